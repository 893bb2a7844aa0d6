"""Tests that all that speaks of releases is made from the one table."""
import importlib.util
import pathlib
import random
import re
import runpy
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from jax._src import config
from jax._src import test_util as jtu
from jax._src.interpreters import mlir
from packaging import version

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch.compat import releases
from jax_cond_patch.compat import structure
import jcp_test_util as tu

config.parse_flags_with_absl()

ROOT = pathlib.Path(__file__).parent.parent
VERSIONS = [release.jax for release in releases.RELEASES]


def results_script():
  spec = importlib.util.spec_from_file_location(
      "results", ROOT / "docs/releases.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class TableTest(tu.JcpTestCase):

  def test_order(self):
    shuffled = random.Random(0).sample(VERSIONS, len(VERSIONS))
    self.assertSequenceEqual(
        sorted(shuffled, key=version.parse), VERSIONS)
    self.assertLen(set(VERSIONS), len(VERSIONS))

  def test_find(self):
    for release in releases.RELEASES:
      self.assertIs(releases.find(release.jax), release)
      self.assertIs(releases.find(release.jax + "+cuda12"), release)
      self.assertFalse(releases.is_newer(release.jax))
      for other in (".dev20240101", "rc0", ".9", ".post1"):
        self.assertIsNone(releases.find(release.jax + other))

  def test_is_newer(self):
    newest = VERSIONS[-1]
    for other in (".1", ".1.dev20300101", ".post1", ".1rc1"):
      self.assertTrue(releases.is_newer(newest + other))
    for other in (".dev20300101", "rc1", "+local"):
      self.assertFalse(releases.is_newer(newest + other))
    self.assertTrue(releases.is_newer("0.100.0"))

  def test_first_of_each_era_is_in_the_subset_of_ci(self):
    for era in ("added", "native"):
      of_era = [r for r in releases.RELEASES if r.era == era]
      self.assertTrue(of_era[0].ci)
      self.assertTrue(of_era[-1].ci)

  def test_pins_of_jaxlib_are_needed(self):
    # JAX requires its jaxlib itself since 0.4.30.
    for release in releases.RELEASES:
      if version.parse(release.jax) < version.parse("0.4.30"):
        self.assertIn(f"jaxlib=={release.jax}", release.pins)

  def test_noxfile(self):
    made = {}
    def parametrize(*args, ids):
      def decorate(fun):
        made[fun.__name__] = (*args, ids)
        return fun
      return decorate
    nox = types.SimpleNamespace(
        options=types.SimpleNamespace(), parametrize=parametrize,
        session=lambda fun=None, **_: fun or (lambda fun: fun))
    with mock.patch.dict(sys.modules, nox=nox), mock.patch.dict("os.environ"):
      runpy.run_path(str(ROOT / "noxfile.py"))
    for names, values, ids in made.values():
      self.assertEqual(names, "python,release")
      self.assertSequenceEqual(
          [(python, tuple(release)) for python, release in values],
          [(r.python, tuple(r)) for r in releases.RELEASES if r.jax in ids])
    self.assertEqual(made["releases"][-1], VERSIONS)

  def test_ci(self):
    script = (ROOT / ".ci/run").read_text()
    code, = re.findall(r"-c '\n(import runpy.*?)'\n", script, re.S)
    code = f"import os; os.chdir({str(ROOT)!r})\n{code}"
    result = tu.run_python(code, PYTHONSAFEPATH="")
    self.assertEqual(result.stdout.split(),
                     [r.jax for r in releases.RELEASES if r.ci], result.stderr)
    for named in re.findall(r"run_tests ([\d.]+)", script):
      self.assertIn(named, VERSIONS)

  def test_readme(self):
    script = results_script()
    _, table, _ = script.split_readme((ROOT / "README.md").read_text())
    self.assertMultiLineEqual(table, script.compatibility())

  def test_results(self):
    text = (ROOT / "docs/releases.md").read_text()
    for table in text.split("\n## With the diffs\n"):
      rows = re.findall(r"^\| ([\d.]+) \|", table, re.M)
      self.assertSequenceEqual(rows, VERSIONS)


@tu.requires("newest_release")
class StructureTest(tu.JcpTestCase):

  def differences(self):
    with jax_cond_patch.deactivated():
      return structure.differences(activation.replaced())

  def test_newest_release_is_as_recorded(self):
    self.assertEmpty(
        self.differences(),
        "python -m jax_cond_patch.compat.structure records it anew.")

  @parameterized.parameters("jaxpr_subcomp", "lower_per_platform",
                            "_platforms_for_eqn_ctx")
  def test_another_signature(self, name):
    def changed(ctx, new):
      return ctx, new
    with jax_cond_patch.deactivated():
      with mock.patch.object(mlir, name, changed):
        change, = self.differences()
    self.assertRegex(change, rf"mlir\.{name} was \(.*\), and is \(ctx, new\)")

  def test_another_body(self):
    with jax_cond_patch.deactivated():
      recorded = structure.shape(activation.replaced())
      names, _ = recorded["mlir.lower_per_platform"]
      changed = {**recorded, "mlir.lower_per_platform": [names, "0"]}
      with mock.patch.object(structure, "shape", lambda replaced: changed):
        change, = self.differences()
    self.assertIn("the code of mlir.lower_per_platform has changed", change)

  def test_gone(self):
    with mock.patch.object(mlir, "lower_with_sharding_in_types", None):
      change, = self.differences()
    self.assertIn("lower_with_sharding_in_types is gone", change)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
