"""Tests of a JAX that has the change in its source: `nox -s patched`.

That the package and the diffs are one is shown by the package's own tests,
which run there too, and by the StableHLO text of a corpus of programs.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
import jax

import jax_cond_patch
from jax_cond_patch import checkout
import jcp_test_util as tu

TESTS = pathlib.Path(__file__).resolve().parent
NEW_TEST = "tests/platform_dependent_test.py"


def may_differ(program: str) -> bool:
  """Whether the package may do better.

  There are fewer residuals where a branch computes its primal output together
  with the tangent.
  """
  if program.startswith("random program"):
    return "'remat'" in program and ("'grad'" in program or "'jvp'" in program)
  return program in ("remat for ('cpu', 'tpu')",
                     "remat for ('tpu', 'cuda', 'cpu')")


def run(*command, python_path=(), **env):
  python_path = os.pathsep.join([*python_path, *filter(None, sys.path)])
  return subprocess.run(
      [sys.executable, *command], capture_output=True, text=True, check=False,
      env={**os.environ, "PYTHONPATH": python_path, **env})


def without_place_of_conditionals(text):
  """What a module is but for the `compute_on` regions of conditionals.

  Up to JAX 0.5.0 the rule for dead code loses that of any conditional. The
  diffs mend the rule; the package leaves ordinary conditionals as they are.
  """
  if jax.__version_info__ > (0, 5, 0):
    return text
  return re.sub(r"\}\) \{mhlo\.frontend_attributes = "
                r'\{_xla_compute_type = "host"\}\}', "})", text)


@tu.requires("diffs")
class PatchedTest(absltest.TestCase):

  def series(self):
    tree = checkout.Tree(pathlib.Path(jax.__file__).parent.parent)
    series, state = tree.find()
    self.assertIs(state, checkout.State.PATCHED)
    return series

  def test_package_does_nothing(self):
    status = jax_cond_patch.status()
    self.assertFalse(status.active)
    self.assertEmpty(status.replaced)
    self.assertIn("the change is in the source of this JAX", status.reason)
    jax_cond_patch.activate()
    self.assertFalse(jax_cond_patch.is_active())
    with self.assertRaisesRegex(
        jax_cond_patch.JaxCondPatchError, "has no pins"):
      jax_cond_patch.activate(pin=("cpu",))

  def test_command_status(self):
    done = run("-m", "jax_cond_patch", "status")
    self.assertRegex(done.stdout, "active +no: the change is in the source")

  def test_new_test_of_the_series(self):
    """The test that the diffs bring to JAX."""
    with tempfile.TemporaryDirectory() as tmp:
      for patch in self.series().patches:
        subprocess.run(["git", "apply", f"--include={NEW_TEST}", "-"], cwd=tmp,
                       input=patch.content, check=True,
                       env={**os.environ, "GIT_CEILING_DIRECTORIES": tmp})
      done = run("-m", "pytest", "-q", "-p", "no:cacheprovider",
                 os.path.join(tmp, NEW_TEST), JAX_ENABLE_CHECKS="1")
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

  def test_corpus(self):
    """The package gives the same text on the JAX that was released."""
    package = pathlib.Path(jax.__file__).parent
    with tempfile.TemporaryDirectory() as tmp:
      shutil.copytree(package, os.path.join(tmp, "jax"),
                      ignore=shutil.ignore_patterns("__pycache__"))
      checkout.apply(tmp, reverse=True)
      corpus = str(TESTS / "corpus.py")
      with_package, with_diffs = run(corpus, python_path=[tmp]), run(corpus)
    texts = []
    for done in (with_package, with_diffs):
      self.assertEqual(done.returncode, 0, done.stderr)
      # JAX 0.5.0 prints what it does not find, before.
      texts.append(json.loads(done.stdout.splitlines()[-1]))
    self.assertGreater(len(texts[0]), 100)
    self.assertEqual(list(texts[0]), list(texts[1]))
    for name, text in texts[0].items():
      if not may_differ(name):
        with self.subTest(name):
          self.assertMultiLineEqual(
              without_place_of_conditionals(texts[1][name]),
              without_place_of_conditionals(text))


if __name__ == "__main__":
  absltest.main()
