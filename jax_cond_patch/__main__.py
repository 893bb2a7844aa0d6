"""The command line: `python -m jax_cond_patch`."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import json
import os
import re
import sys

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch import checkout
from jax_cond_patch import runner


def _demo(args: argparse.Namespace) -> int:
  del args
  from jax_cond_patch import demo  # It imports NumPy, which `apply` needs not.
  return demo.main()


def _status(args: argparse.Namespace) -> int:
  if activation.is_active():
    activation.table()  # Also what JAX imports late is replaced now.
  status = activation.status()
  if args.json:
    print(json.dumps(dataclasses.asdict(status), indent=2))
    return 0
  rows = [("jax_cond_patch", jax_cond_patch.__version__),
          ("JAX", status.jax_version or "none"),
          ("era", status.era or "unknown"),
          ("active", f"{'yes' if status.active else 'no'}: {status.reason}"),
          ("defers errors", "yes" if status.defers else "no"),
          ("pin", ", ".join(status.pin) if status.pin else "none"),
          ("switches", " ".join(f"{name}={os.environ[name]}" for name in
                                activation.SWITCHES if name in os.environ) or
           "none"),
          ("replaced", f"{len(status.replaced)} in JAX")]
  for name, value in rows:
    print(f"{name:<15} {value}")
  whys = {r.name: r.why for r in activation.table()} if status.replaced else {}
  width = max(map(len, status.replaced), default=0)
  for name in status.replaced:
    print(f"  {name:<{width}}  {whys[name]}")
  return 0


def _apply(args: argparse.Namespace) -> int:
  try:
    print(checkout.apply(args.checkout, check=args.check,
                         commit=not args.no_commit, reverse=args.reverse))
  except checkout.CheckoutError as error:
    print(error, file=sys.stderr)
    return 1
  return 0


def _list(args: argparse.Namespace) -> int:
  del args
  for release in checkout.manifest():
    base = release.commit or "the package that was released"
    print(f"{release.release:<10} {release.series:<10} {base}")
  return 0


_TYPES = dict(f="float", bf="bfloat", i="int", u="uint", c="complex")


def _shape(text: str):
  """Reads the argument of a function as JAX prints it, `f32[8,128]`."""
  import jax
  import numpy as np
  match = re.fullmatch(r"([a-z]+)(\d*)\[([\d,]*)\]", text)
  try:
    if match is None:
      raise TypeError
    dtype = np.dtype(_TYPES.get(match[1], match[1]) + match[2])
  except TypeError:
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a type and shape like f32[8,128] or i32[]") from None
  shape = [int(size) for size in match[3].split(",") if size]
  return jax.ShapeDtypeStruct(shape, dtype)


def _function(text: str) -> Callable:
  """Loads `FILE:FUNCTION`; the file runs as a module."""
  file, _, name = text.rpartition(":")
  if not os.path.isfile(file):
    raise argparse.ArgumentTypeError(
        f"{text!r} is not FILE:FUNCTION: there is no file {file!r}")
  sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
  module_name = os.path.splitext(os.path.basename(file))[0]
  spec = importlib.util.spec_from_file_location(module_name, file)
  if spec is None or spec.loader is None:
    raise argparse.ArgumentTypeError(f"{file!r} is not a file of Python code")
  module = importlib.util.module_from_spec(spec)
  sys.modules[module_name] = module
  spec.loader.exec_module(module)
  fun = getattr(module, name, None)
  if not callable(fun):
    raise argparse.ArgumentTypeError(f"{file} has no function {name!r}")
  return fun


def _explain(args: argparse.Namespace) -> int:
  explanation = jax_cond_patch.explain(
      args.function, *args.arguments, platforms=args.platforms.split(","))
  if args.html:
    with open(args.html, "w", encoding="utf-8") as f:
      f.write('<!DOCTYPE html>\n<meta charset="utf-8">\n'
              f"<title>{args.function.__name__}</title>\n"
              f"{explanation._repr_html_()}\n")
  else:
    print(explanation)
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
  command.set_defaults(run=_demo)

  command = commands.add_parser(
      "status", help="say whether JAX is patched, why, and what is replaced",
      description="Says whether `import jax_cond_patch` patches the installed "
      "JAX in this environment, why, and what it replaces.")
  command.add_argument("--json", action="store_true", help="print JSON")
  command.set_defaults(run=_status)

  command = commands.add_parser(
      "explain", help="tell what becomes of a function's platform conditionals",
      description="Traces a function and tells, without running or compiling "
      "it, which branches its platform conditionals take.")
  command.add_argument("function", metavar="FILE:FUNCTION", type=_function,
                       help="the function, which takes arrays")
  command.add_argument("arguments", metavar="ARGUMENT", nargs="*", type=_shape,
                       help="the type and shape of an argument, as f32[8,128]")
  command.add_argument("--platforms", default="cpu,tpu", metavar="NAME,...",
                       help="the lowering platforms (default: %(default)s)")
  command.add_argument("--html", metavar="FILE",
                       help="write a drawing instead of printing a table")
  command.set_defaults(run=_explain)

  command = commands.add_parser(
      "apply", help="put the change into the source of JAX, as diffs",
      description="Puts the change into a git checkout of JAX, as commits, or "
      "into an unpacked release. The exit status is 0 only if the tree is then "
      "as asked; if not, it is as it was.")
  command.add_argument("checkout", metavar="CHECKOUT", help="the folder that "
                       "has JAX's folder jax in it")
  command.add_argument("--check", action="store_true",
                       help="only say what would be done")
  command.add_argument("--no-commit", action="store_true",
                       help="change the files of a checkout without commits")
  command.add_argument("--reverse", action="store_true",
                       help="take the diffs out again")
  command.set_defaults(run=_apply)

  command = commands.add_parser(
      "list", help="list the releases of JAX that there are diffs for",
      description="Lists the releases of JAX that there are diffs for.")
  command.set_defaults(run=_list)

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
