"""Runs a program of someone's on a patched JAX.

The program gets an interpreter of its own, which replaces this one, so that its
arguments, `__main__`, tracebacks and exit status are those that it would have
without the package. `startup/sitecustomize.py` patches JAX there.
"""
from __future__ import annotations

from collections.abc import Sequence
import os
import subprocess
import sys

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def is_command_without_jax() -> bool:
  """Whether this is a command of `python -m jax_cond_patch` that needs no JAX.

  `apply` and `list` work where there is no JAX that can be imported, and the
  process of `run` is replaced by that of the program.
  """
  # While Python looks for the module, "-m" stands for its file.
  if sys.argv[:1] != ["-m"] or sys.argv[1:2] not in (
      ["apply"], ["list"], ["run"]):
    return False
  python = sys.orig_argv[:len(sys.orig_argv) - len(sys.argv[1:])]
  return "".join(python[-2:]).endswith("-mjax_cond_patch")


def split_program(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits the arguments of `run` into its own and the program's.

  Args:
    argv: what follows `run` on the command line.

  Returns:
    The options before the program, and the program with its arguments, which
    starts with a file, `-m` or `-c`.
  """
  for i, arg in enumerate(argv):
    if arg in ("-", "-m", "-c") or not arg.startswith("-"):
      return list(argv[:i]), list(argv[i:])
  return list(argv), []


def run(program: Sequence[str], children: bool) -> int:
  """Replaces this process by a Python that runs a program patched.

  Args:
    program: a file, or `-m` and a module, or `-c` and code, and its arguments.
    children: whether the Pythons that it starts patch their JAX as well. Forked
      processes are patched in any case.

  Returns:
    The exit status, where a process cannot be replaced (Windows) or the program
    cannot be started.
  """
  if sys.flags.ignore_environment or sys.flags.no_site:
    print("jax_cond_patch run reaches the program through PYTHONPATH and "
          "sitecustomize, which Python was told to ignore. Leave out the "
          "options -I, -E and -S. See docs/pages/errors.md#run-environment.",
          file=sys.stderr)
    return 2
  env = {**os.environ, "JAX_COND_PATCH_RUN": "children" if children else "once"}
  env["PYTHONPATH"] = os.pathsep.join(
      filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))
  command = [sys.executable, *_interpreter_options(), *program]
  if os.name == "nt":
    return subprocess.call(command, env=env)
  sys.stdout.flush()
  sys.stderr.flush()
  os.execve(sys.executable, command, env)


def _interpreter_options() -> list[str]:
  """The options of this Python, which stand before `-m jax_cond_patch`."""
  options = sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv[1:])]
  module = 1 if options[-1].startswith("-m") else 2
  return options[:-module]
