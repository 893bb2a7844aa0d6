"""Makes the table and the plot of docs/pages/costs.md from measurements.

  python benchmarks/report.py RESULT.json ...

The results are those of `pytest --benchmark-json`, of several releases of JAX.
"""
import collections
import itertools
import json
import pathlib
import re
import sys

import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

PAGE = pathlib.Path(__file__).parents[1] / "docs/pages/costs.md"
# What is made stands between these, in the order of `tables`.
MADE = re.compile(
    "(<!-- Made by benchmarks/report.py. -->\n).*?(<!-- End. -->)", re.S)


def read(paths):
  """Returns what was measured, as pairs of seconds and other information."""
  found = []
  for path in paths:
    for result in json.loads(pathlib.Path(path).read_text())["benchmarks"]:
      found.append((result["stats"]["median"], result["extra_info"]))
  return found


def sites(measured, **wanted):
  return sorted(
      ((seconds, info) for seconds, info in measured if "phase" in info and all(
          info[name] == value for name, value in wanted.items())),
      key=lambda result: (result[1]["branches"], result[1]["sites"]))


def ratio(x, y):
  return f"x{x / y:.2f}" if y else "-"


_PHASES = ("trace", "lower", "operations", "bytes", "compile", "first call",
           "export", "operations of the export", "bytes of the export")


def table(measured):
  """One row for each program and phase, the releases side by side."""
  measured = [result for result in measured if "phase" in result[1]]
  releases = list(dict.fromkeys(info["jax"] for _, info in measured))
  releases.sort(key=lambda release: [int(n) for n in release.split(".")])
  cells = collections.defaultdict(dict)
  for seconds, info in sites(measured):
    program = (info["transformation"], info["layers"], info["sites"],
               info["branches"])
    found = {info["phase"]: (info["unpatched"], seconds, info["direct"])}
    for counted in ("operations", "bytes"):
      if f"patched {counted}" in info:
        of = " of the export" if info["phase"] == "export" else ""
        found[counted + of] = tuple(
            info[f"{way} {counted}"]
            for way in ("unpatched", "patched", "direct"))
    for phase, (unpatched, patched, direct) in found.items():
      cells[(*program, phase)][info["jax"]] = (
          f"{ratio(unpatched, direct)} / {ratio(patched, direct)}")
  lines = [
      "| program | layers | sites | branches | phase | " +
      " | ".join(releases) + " |",
      "|---" * (5 + len(releases)) + "|"]
  for row, by_release in sorted(cells.items(), key=lambda cell: (
      *cell[0][:-1], _PHASES.index(cell[0][-1]))):
    lines.append("| " + " | ".join(map(str, row)) + " | " + " | ".join(
        by_release.get(release, "-") for release in releases) + " |")
  return "\n".join(lines)


def tables(measured):
  """The programs of 60 sites, times that are not ratios, and the others."""
  def has_60_sites(result):
    return result[1].get("sites") == 60
  times = [
      f"- JAX {info['jax']}: {text.format(info[name] * 1000)}"
      for name, text in (
          ("added", "`import jax_cond_patch` adds {:.0f} ms to `import jax`."),
          ("activation", "`activate` takes {:.1f} ms."))
      for _, info in measured if name in info]
  return (table(filter(has_60_sites, measured)), "\n".join(sorted(times)),
          table(itertools.filterfalse(has_60_sites, measured)))


def plot(measured, path):
  """Draws ratios to the direct call against sites and against branches."""
  figure, axes = plt.subplots(
      2, 2, figsize=(9, 6), sharex="col", layout="constrained")
  for row, phase in zip(axes, ("trace", "lower")):
    for axis, x_name, fixed in zip(
        row, ("sites", "branches"), (dict(branches=4), dict(sites=10))):
      for release in dict.fromkeys(
          info["jax"] for _, info in measured if "phase" in info):
        found = sites(measured, transformation="gradient", layers="equal",
                      phase=phase, jax=release, **fixed)
        if not found:
          continue
        xs = [info[x_name] for _, info in found]
        line, = axis.plot(
            xs, [seconds / info["direct"] for seconds, info in found],
            marker="o", label=f"{release}, patched")
        axis.plot(xs, [info["unpatched"] / info["direct"] for _, info in found],
                  marker="o", linestyle=":", color=line.get_color(),
                  label=f"{release}, unpatched")
      axis.set_ylabel(f"{phase}: times the direct call")
      axis.set_yscale("log")
      axis.set_xlabel(x_name)
      if x_name == "sites":
        axis.set_xscale("log")
  axes[0][0].legend(fontsize="small")
  figure.suptitle("The gradient of a model of 16x16 layers")
  figure.savefig(path, metadata=dict(Date=None))


def main():
  measured = read(sys.argv[1:])
  plt.rcParams["svg.hashsalt"] = "jax_cond_patch"
  plot(measured, PAGE.with_suffix(".svg"))
  made = iter(tables(measured))
  PAGE.write_text(
      MADE.sub(lambda block: f"{block[1]}\n{next(made)}\n\n{block[2]}",
               PAGE.read_text()))


if __name__ == "__main__":
  main()
