"""Runs many random programs, with the package and without it."""
from __future__ import annotations

import argparse
import collections
import random
import sys
import time

import hypothesis
import jax

import jax_cond_patch
import random_programs

RESULTS = ("right", "error", "wrong number", "unreachable code")


def run(examples: int, seed: int) -> tuple[collections.Counter, list[str]]:
  """Runs random programs; the same ones for the same seed.

  Returns:
    How many had each result, and a report of each that was not right.
  """
  counts: collections.Counter = collections.Counter()
  reports = []

  @random_programs.sampling(examples, seed)
  def count(program):
    try:
      expected = random_programs.expected(program)
    except random_programs.TooClose:
      hypothesis.assume(False)
    result = "right"
    try:
      random_programs.check(program, expected)
    except random_programs.WrongNumber as error:
      result, report = "wrong number", error
    except random_programs.UnreachableCode as error:
      result, report = "unreachable code", error
    except Exception as error:  # pylint: disable=broad-except
      result, report = "error", f"{type(error).__name__}: {error}: {program}"
    counts[result] += 1
    if result != "right":
      reports.append(f"{result}: {report}")
    if counts.total() % 50 == 0:
      # What JAX keeps of old programs would fill the memory.
      jax.clear_caches()

  count()
  jax_cond_patch.pin(None)
  return counts, reports


def main(examples: int, seed: int, patched_only: bool) -> bool:
  print(f"jax {jax.__version__}, {examples} programs, seed {seed}", flush=True)
  print(f"{'':10}" + "".join(f"{r:>18}" for r in (*RESULTS, "CPU seconds")))
  ways = {"patched": jax_cond_patch.activated}
  if not patched_only:
    ways = {"unpatched": jax_cond_patch.deactivated, **ways}
  for name, context in ways.items():
    start = time.process_time()
    with context():
      counts, reports = run(examples, seed)
    print(f"{name:10}" + "".join(f"{counts[r]:18}" for r in RESULTS) +
          f"{time.process_time() - start:18.0f}", flush=True)
  for report in reports:
    print(report)
  return not reports


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("examples", type=int)
  parser.add_argument("seed", type=int, nargs="?",
                      default=random.randrange(1 << 32))
  parser.add_argument("--patched-only", action="store_true",
                      help="not without the package")
  args = parser.parse_args()
  sys.exit(not main(args.examples, args.seed, args.patched_only))
