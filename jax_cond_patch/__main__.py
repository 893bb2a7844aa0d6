"""The command line: `python -m jax_cond_patch`."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import sys

from jax_cond_patch import demo


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

  args = parser.parse_args(argv)
  return args.run(args)


if __name__ == "__main__":
  sys.exit(main())
