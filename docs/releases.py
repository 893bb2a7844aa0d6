"""Makes docs/releases.md from the reports of `nox -s releases patched`.

It also puts the table of releases into the README, between two comments.

python docs/releases.py .nox/reports
"""
import collections
import itertools
import importlib.util
import pathlib
import sys
from xml.etree import ElementTree

_ROOT = pathlib.Path(__file__).parent.parent

_HEAD = """\
# Results on each release

Made by `docs/releases.py` from the reports of `nox -s releases patched`; do not
edit. A test is skipped where a release does not have what it is about.
"""

_COLUMNS = """
| JAX | jaxlib | Python | date | test files | passed | failed | skipped |
|-----|--------|--------|------|------------|--------|--------|---------|
"""

_WITH_THE_DIFFS = """
## With the diffs

The tests of what JAX does with the diffs of `patches/` too. There the package
finds them and does nothing.
"""


_PARAMS = dict(added="`platforms`, added", native="`branches_platforms`, JAX's")


def _releases():
  """Reads the table of releases, without importing JAX."""
  spec = importlib.util.spec_from_file_location(
      "releases", _ROOT / "jax_cond_patch/compat/releases.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.RELEASES


def _row(jax: str, path: pathlib.Path, reasons: dict[str, list[str]]) -> str:
  """One line of the table."""
  if not path.exists():
    return f"| {jax} | | | not run | | | | |\n"
  suite = ElementTree.parse(path).getroot().find("testsuite")
  versions = dict(part.split(" ") for part in suite.get("name").split(", "))
  if versions["JAX"] != jax:
    raise SystemExit(f"{path} is the report of JAX {versions['JAX']}.")
  cases = suite.findall("testcase")
  names = {case.get("classname").split(".")[-2] for case in cases}
  num_files = len(list((_ROOT / "tests").glob("*_test.py")))
  skipped = [case for case in cases if case.find("skipped") is not None]
  for case in skipped:
    reason = case.find("skipped").get("message")
    if jax not in reasons[reason]:
      reasons[reason].append(jax)
  failed = [case for case in cases if case.find("failure") is not None or
            case.find("error") is not None]
  passed = len(cases) - len(failed) - len(skipped)
  return (f"| {jax} | {versions['jaxlib']} | {versions['Python']} | "
          f"{suite.get('timestamp')[:10]} | {len(names)} of {num_files} | "
          f"{passed} | {len(failed)} | {len(skipped)} |\n")


def _ranges(versions: list[str]) -> str:
  """Names releases, those that follow each other by the first and the last."""
  ranges, in_range = [], False
  for release in _releases():
    if release.jax not in versions:
      in_range = False
    elif in_range:
      ranges[-1] = f"{ranges[-1].split(' ')[0]} to {release.jax}"
    else:
      ranges.append(release.jax)
      in_range = True
  return ", ".join(ranges)


def compatibility() -> str:
  """The README's table: releases that are alike in one line."""
  def line(release):
    pins = [("jaxlib of the same version" if pin == f"jaxlib=={release.jax}"
             else f"`{pin}`") for pin in release.pins]
    return (f"| {release.python} | {', '.join(pins) or '-'} | "
            f"{_PARAMS[release.era]} |\n")

  text = ("| JAX | tested with Python | to be asked for with it | param of "
          "`cond` |\n|---|---|---|---|\n")
  for rest, group in itertools.groupby(_releases(), line):
    versions = [release.jax for release in group]
    text += "| " + (versions[0] if len(versions) == 1 else
                    f"{versions[0]} to {versions[-1]}") + " " + rest
  return text


def main() -> None:
  reports = pathlib.Path(sys.argv[1])
  reasons: dict[str, list[str]] = collections.defaultdict(list)
  text = _HEAD
  for title, prefix in (("", ""), (_WITH_THE_DIFFS, "patched-")):
    text += title + _COLUMNS + "".join(
        _row(r.jax, reports / f"{prefix}{r.jax}.xml", reasons)
        for r in _releases())
  if reasons:
    text += "\nWhy tests are skipped, and on which releases:\n\n"
    for reason, skipped_on in reasons.items():
      text += f"- {reason} ({_ranges(skipped_on)})\n"
  (_ROOT / "docs/releases.md").write_text(text)
  readme = _ROOT / "README.md"
  before, _, after = split_readme(readme.read_text())
  readme.write_text(before + compatibility() + after)


def split_readme(text: str) -> tuple[str, str, str]:
  """What stands before, in and after the README's table."""
  before, rest = text.split("<!-- releases -->\n\n")
  table, after = rest.split("\n<!-- end of releases -->")
  return (f"{before}<!-- releases -->\n\n", table,
          f"\n<!-- end of releases -->{after}")


if __name__ == "__main__":
  main()
