"""The command line: `python -m jax_cond_patch`."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import json
import sys

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch import demo
from jax_cond_patch import runner


def _status(args: argparse.Namespace) -> int:
  status = activation.status()
  if args.json:
    print(json.dumps(dataclasses.asdict(status), indent=2))
    return 0
  rows = [("jax_cond_patch", jax_cond_patch.__version__),
          ("JAX", status.jax_version or "none"),
          ("era", status.era or "unknown"),
          ("active", f"{'yes' if status.active else 'no'}: {status.reason}"),
          ("replaced", f"{len(status.replaced)} in JAX")]
  for name, value in rows:
    print(f"{name:<15} {value}")
  whys = {r.name: r.why for r in activation.table()} if status.replaced else {}
  width = max(map(len, status.replaced), default=0)
  for name in status.replaced:
    print(f"  {name:<{width}}  {whys[name]}")
  return 0


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a subcommand, and returns the exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m jax_cond_patch",
      description="Platform conditionals that lower only what can be reached.")
  commands = parser.add_subparsers(
      title="commands", metavar="COMMAND", required=True)

  command = commands.add_parser(
      "demo", help="run small programs without and with the package",
      description="Runs small programs on the CPU, each in an interpreter of "
      "its own, without and with the package. The exit status is 0 only if "
      "every program is right with it.")
  command.set_defaults(run=lambda args: demo.main())

  command = commands.add_parser(
      "status", help="say whether JAX is patched, why, and what is replaced",
      description="Says whether `import jax_cond_patch` patches the installed "
      "JAX in this environment, why, and what it replaces.")
  command.add_argument("--json", action="store_true", help="print JSON")
  command.set_defaults(run=_status)

  run_command = commands.add_parser(
      "run", help="run a program on a patched JAX",
      usage="%(prog)s [-h] [--children] (SCRIPT | -m MODULE | -c CODE) "
      "[ARGUMENT ...]",
      description="Runs a program as Python does, on a patched JAX.")
  run_command.add_argument(
      "--children", action="store_true", help="patch JAX in the Pythons that "
      "the program starts, too; forked processes are patched in any case")

  def run_program(args):
    if not program:
      run_command.error("there is no program to run")
    return runner.run(program, args.children)

  run_command.set_defaults(run=run_program)

  argv = list(sys.argv[1:] if argv is None else argv)
  program: list[str] = []
  if argv[:1] == ["run"]:
    options, program = runner.split_program(argv[1:])
    argv = ["run", *options]
  args = parser.parse_args(argv)
  return args.run(args)


if __name__ == "__main__":
  sys.exit(main())
