"""Runs JAX's own tests without and with the package, and compares them.

They are those of the tag of the JAX that is installed, from a checkout with the
history of JAX. Where a test ends otherwise with the package, that must be in
`DIFFERENCES`, and what is there must happen.

python tests/upstream.py run CHECKOUT [FILES]
python tests/upstream.py table docs/upstream.md
"""
from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable
import dataclasses
from importlib import metadata
import io
import pathlib
import subprocess
import sys
import tarfile
from xml.etree import ElementTree

from packaging import specifiers
from packaging import version

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
  """A test that ends otherwise with the package.

  Attributes:
    file: the file that it is in.
    test: its name.
    releases: the releases, as a version specifier.
    outcome: how it ends with the package.
    reason: why it does.
  """
  file: str
  test: str
  releases: str
  outcome: str
  reason: str


_ALL_BRANCHES = (
    "It asserts that every branch is lowered. JAX's own fix, in 0.6.1, changed "
    "it.")
_CONTROL_FLOW = "LaxControlFlowTest.test_platform_dependent_"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "lax_control_flow_test", f"{_CONTROL_FLOW}lowering", "<0.6.1", "failed",
        _ALL_BRANCHES),
    Difference(
        "lax_control_flow_test",
        f"{_CONTROL_FLOW}with_non_existent_custom_call", ">0.4.30,<0.6.1",
        "failed", _ALL_BRANCHES),
    Difference(
        "lax_control_flow_test", f"{_CONTROL_FLOW}no_default", ">=0.4.21",
        "failed",
        "It asserts the message of JAX's error. That of the package says which "
        "platform has no branch, and where the call is; its type is JAX's."),
)


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


# What tests import of JAX that may not be in its wheel.
_TEST_UTILS = (
    "jax/_src/internal_test_util", ":(glob)jax/_src/**/*test_util.py")

# It comes last: what is in the wheel is found there.
_CONFTEST = """\
import importlib.util
import pathlib
import sys
# In JAX 0.7.2 its own modules can't be imported before this one.
import jax.experimental.pallas

class TestUtilsFinder:
  @staticmethod
  def find_spec(name, path=None, target=None):
    module = pathlib.Path(__file__).parent / name.replace(".", "/")
    for file in (module.with_suffix(".py"), module / "__init__.py"):
      if file.exists():
        return importlib.util.spec_from_file_location(name, file)

sys.meta_path.append(TestUtilsFinder)
"""


def unpacked_tests(checkout: str, release: str, directory: pathlib.Path
                   ) -> pathlib.Path:
  """Takes JAX's tests of a release out of a checkout's history."""
  if not directory.exists():
    archive = subprocess.run(
        ["git", "-C", checkout, "archive", f"jax-v{release}", "tests",
         *_TEST_UTILS], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      tar.extractall(directory, filter="data")
    (directory / "conftest.py").write_text(_CONFTEST)
  return directory


def compare(release: str, file: str, without: dict[str, str],
            with_: dict[str, str]) -> tuple[int, list[str]]:
  """Compares how the tests of a file ended.

  Args:
    release: the version of JAX.
    file: the name of the file.
    without: how they ended without the package.
    with_: how they ended with it.

  Returns:
    The number of known differences, and what is not as it should be.
  """
  if not (without and with_):
    return 0, [f"{file}: no report of pytest; see the log beside the reports"]
  different = {
      name: (without.get(name, "not run"), with_.get(name, "not run"))
      for name in {**without, **with_} if without.get(name) != with_.get(name)}
  known = set()
  wrong = []
  for difference in DIFFERENCES:
    if difference.file != file or not specifiers.SpecifierSet(
        difference.releases, prereleases=True).contains(release):
      continue
    test = difference.test
    if different.get(test, ("", ""))[1] == difference.outcome:
      known.add(test)
    else:
      wrong.append(f"{file}: {test} did not end as it should: {difference}")
  wrong += [f"{file}: {name}: {a} without, {b} with the package"
            for name, (a, b) in different.items() if name not in known]
  return len(known), wrong


def run(checkout: str, files: Iterable[str], reports: pathlib.Path) -> bool:
  """Runs files of tests, and prints how they compare; False if one is wrong."""
  release = metadata.version("jax")
  reports = reports.absolute() / release
  root = unpacked_tests(checkout, release, reports / "tree")
  print(f"JAX {release}")
  all_wrong = []
  for file in files:
    test = root / "tests" / f"{file}.py"
    if not test.exists():
      continue
    report = _report(file)
    runs = {reports / "with" / report: ["-m", "jax_cond_patch", "run", "-m"]}
    # This does not change with the package.
    if not (reports / "without" / report).exists():
      runs[reports / "without" / report] = ["-m"]
    for process in [start(root, test, *way) for way in runs.items()]:
      process.wait()
    row, wrong = _row(reports, release, file)
    print(row, flush=True)
    all_wrong += wrong
  for line in all_wrong:
    print(line)
  return not all_wrong


_HEAD = """\
# JAX's own tests

Made by `tests/upstream.py` from the reports of `nox -s upstream`; do not edit.
Files of tests of each release's tag, run on that release without and with the
package: how many tests passed, failed and were skipped. A test that fails
without the package does so on the machine of these runs.

"""

_COLUMNS = """\
| JAX | file | date | without | with | other, as known | other, not known |
|-----|------|------|---------|------|-----------------|------------------|
"""


def table(reports: pathlib.Path, page: str) -> str:
  """Makes the page that says how all runs compare.

  Args:
    reports: the folder with the reports of the runs.
    page: the page as it is; the rows of other runs stay.
  """
  rows = {}
  for row in page.splitlines():
    release, file = [*map(str.strip, row.split("|")), "", "", ""][1:3]
    if file in FILES:
      rows[version.parse(release), FILES.index(file)] = row
  for path in reports.glob("*"):
    for i, file in enumerate(FILES):
      if (path / "with" / _report(file)).exists():
        rows[version.parse(path.name), i], _ = _row(path, path.name, file)
  text = _HEAD + _COLUMNS + "".join(rows[key] + "\n" for key in sorted(rows))
  text += "\nWhat is known to end otherwise with the package:\n\n"
  for difference in DIFFERENCES:
    text += (f"- JAX `{difference.releases}`, `{difference.test}`: "
             f"{difference.outcome}. {difference.reason}\n")
  return text


def _report(file: str) -> str:
  return f"{file.replace('/', '.')}.xml"


def _row(reports: pathlib.Path, release: str, file: str
         ) -> tuple[str, list[str]]:
  """A row of the table, and what is not as it should be."""
  without, with_ = (outcomes(reports / way / _report(file))
                    for way in ("without", "with"))
  known, wrong = compare(release, file, without, with_)
  return (f"| {release} | {file} | {_date(reports / 'with' / _report(file))} | "
          f"{_summary(without)} | {_summary(with_)} | {known} | {len(wrong)} |"
          ), wrong


def _date(report: pathlib.Path) -> str:
  if not report.exists():
    return ""
  suite = ElementTree.parse(report).find("testsuite")
  return "" if suite is None else suite.get("timestamp", "")[:10]


def _summary(found: dict[str, str]) -> str:
  counts = collections.Counter(found.values())
  failed = counts["failed"] + counts["error"]
  return f"{counts['passed']} / {failed} / {counts['skipped']}"


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  run_parser = commands.add_parser("run", help="run JAX's tests")
  run_parser.add_argument("checkout", help="a checkout of JAX with its tags")
  run_parser.add_argument("files", nargs="*", default=FILES,
                          help="names of test files, without .py")
  table_parser = commands.add_parser("table", help="make the page of all runs")
  table_parser.add_argument("page", type=pathlib.Path)
  parser.add_argument("--reports", type=pathlib.Path,
                      default=pathlib.Path(".nox/upstream"))
  args = parser.parse_args()
  if args.command == "table":
    page = args.page.read_text() if args.page.exists() else ""
    args.page.write_text(table(args.reports, page))
  else:
    sys.exit(not run(args.checkout, args.files, args.reports))
