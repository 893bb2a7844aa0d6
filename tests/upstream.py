"""Runs JAX's own tests without and with the package, and compares them.

They are those of the tag of the JAX that is installed, from a checkout with the
history of JAX. Where a test ends otherwise with the package, that must be in
`DIFFERENCES`, and what is there must happen.
"""
from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable
import dataclasses
import io
import pathlib
import re
import subprocess
import sys
import tarfile
from xml.etree import ElementTree

import jax
from packaging import specifiers

# What meets conditionals. Not all are in each release.
FILES = (
    "lax_control_flow_test", "export_test", "shape_poly_test", "checkify_test",
    "shard_map_test", "state_test", "pallas/pallas_test",
    "pallas/tpu_pallas_interpret_test", "api_test", "remat_test",
    "custom_api_test", "custom_root_test", "custom_linear_solve_test",
    "custom_partitioning_test", "debugging_primitives_test",
    "python_callback_test", "host_callback_test")


@dataclasses.dataclass(frozen=True)
class Difference:
  """Tests that end otherwise with the package.

  Attributes:
    file: the file that they are in.
    tests: a regular expression for their names.
    releases: the releases, as a version specifier.
    outcome: how they end with the package.
    reason: why they do.
  """
  file: str
  tests: str
  releases: str
  outcome: str
  reason: str


DIFFERENCES: tuple[Difference, ...] = ()


def outcomes(report: pathlib.Path) -> dict[str, str]:
  """Reads how tests ended from a report of pytest's.

  Args:
    report: the file, in JUnit's format.

  Returns:
    "passed", "skipped", "failed" or "error" by the name of the test; nothing if
    pytest did not come to its end.
  """
  if not report.exists():
    return {}
  found = {}
  for case in ElementTree.parse(report).iter("testcase"):
    name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
    tags = {child.tag for child in case}
    found[name] = next((
        outcome for tag, outcome in (
            ("error", "error"), ("failure", "failed"), ("skipped", "skipped"))
        if tag in tags), "passed")
  return found


def start(root: pathlib.Path, test: pathlib.Path, report: pathlib.Path,
          runner: Iterable[str]) -> subprocess.Popen:
  """Starts pytest on a file of tests; its output is beside the report."""
  report.parent.mkdir(parents=True, exist_ok=True)
  report.unlink(missing_ok=True)
  # JAX's own settings of pytest make errors of warnings, also of other
  # packages' newer versions.
  with report.with_suffix(".log").open("w") as log:
    return subprocess.Popen(
        [sys.executable, *runner, "pytest", "-q", "--tb=short", "-p",
         "no:cacheprovider", "-c", "/dev/null", f"--rootdir={root}",
         f"--junitxml={report}", str(test)],
        stdout=log, stderr=subprocess.STDOUT)


# What tests import of JAX that is not in its wheel.
_NOT_IN_WHEEL = "jax/_src/internal_test_util"

_CONFTEST = """\
import pathlib
import jax._src
jax._src.__path__.append(str(pathlib.Path(__file__).parent / "jax/_src"))
"""


def unpacked_tests(checkout: str, directory: pathlib.Path) -> pathlib.Path:
  """Takes JAX's tests of the installed release out of a checkout's history."""
  if not directory.exists():
    tag = f"jax-v{jax.__version__}"
    archive = subprocess.run(
        ["git", "-C", checkout, "archive", tag, "tests", _NOT_IN_WHEEL],
        check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      tar.extractall(directory, filter="data")
    (directory / "conftest.py").write_text(_CONFTEST)
  return directory


def compare(file: str, without: dict[str, str], with_: dict[str, str]
            ) -> tuple[int, list[str]]:
  """Compares how the tests of a file ended.

  Args:
    file: the name of the file.
    without: how they ended without the package.
    with_: how they ended with it.

  Returns:
    The number of known differences, and what is not as it should be.
  """
  different = {
      name: (without.get(name, "not run"), with_.get(name, "not run"))
      for name in {**without, **with_} if without.get(name) != with_.get(name)}
  if not (without and with_):
    return 0, [f"{file}: no report of pytest; see the log beside the reports"]
  known = set()
  wrong = []
  for difference in DIFFERENCES:
    if difference.file != file or not specifiers.SpecifierSet(
        difference.releases, prereleases=True).contains(jax.__version__):
      continue
    found = {name for name, (_, outcome) in different.items()
             if re.fullmatch(difference.tests, name) and
             outcome == difference.outcome}
    if not found:
      wrong.append(f"{file}: nothing is as in {difference}")
    known |= found
  wrong += [f"{file}: {name}: {a} without, {b} with the package"
            for name, (a, b) in different.items() if name not in known]
  return len(known), wrong


def main(checkout: str, files: Iterable[str], reports: pathlib.Path) -> bool:
  reports = reports.absolute() / jax.__version__
  root = unpacked_tests(checkout, reports / "tree")
  print(f"JAX {jax.__version__}")
  print(f"{'':34}{'without':>22}{'with':>22}{'known':>8}{'wrong':>8}")
  all_wrong = []
  for file in files:
    test = root / "tests" / f"{file}.py"
    if not test.exists():
      continue
    name = f"{file.replace('/', '.')}.xml"
    runs = {reports / "with" / name: ["-m", "jax_cond_patch", "run", "-m"]}
    # This does not change with the package.
    if not (reports / "without" / name).exists():
      runs[reports / "without" / name] = ["-m"]
    for process in [start(root, test, *report) for report in runs.items()]:
      process.wait()
    without, with_ = (outcomes(reports / way / name)
                      for way in ("without", "with"))
    known, wrong = compare(file, without, with_)
    all_wrong += wrong
    print(f"{file:34}{_summary(without):>22}{_summary(with_):>22}{known:8}"
          f"{len(wrong):8}", flush=True)
  for line in all_wrong:
    print(line)
  return not all_wrong


def _summary(found: dict[str, str]) -> str:
  counts = collections.Counter(found.values())
  failed = counts["failed"] + counts["error"]
  return f"{counts['passed']} ok, {failed} failed"


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("checkout", help="a checkout of JAX with its tags")
  parser.add_argument("files", nargs="*", default=FILES,
                      help="names of test files, without .py")
  parser.add_argument("--reports", type=pathlib.Path,
                      default=pathlib.Path(".nox/upstream"))
  args = parser.parse_args()
  sys.exit(not main(args.checkout, args.files, args.reports))
