"""Runs the code in the documentation, and checks that it is complete.

The Python blocks of a page run one after another, as one module; one that
starts with `# name.py` is a file of that name as well, for the commands of the
page. A text block is what the block before it prints.
"""
import ast
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src import config
from jax._src import test_util as jtu

import jax_cond_patch

config.parse_flags_with_absl()

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/pages").glob("*.md"))


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
  """The code blocks of a page: their languages and texts."""
  return re.findall(r"(?m)^```(\w*)\n(.*?)^```$", page.read_text("utf-8"),
                    re.DOTALL)


class DocsTest(parameterized.TestCase):

  def run_python(self, code: str) -> str:
    name = re.match(r"# (\w+\.py)\n", code)
    file = pathlib.Path(name[1] if name else "page.py").absolute()
    file.write_text(code, "utf-8")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      exec(compile(code, str(file), "exec"), self.namespace)
    return out.getvalue()

  def run_sh(self, code: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu",
           "PATH": os.pathsep.join([os.getcwd(), os.environ["PATH"]]),
           "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["sh", "-ec", code], env=env, text=True,
                            capture_output=True, check=False)
    self.assertEqual(result.returncode, 0, result.stderr)
    return result.stdout

  @parameterized.named_parameters((page.stem, page) for page in PAGES)
  @unittest.skipUnless(
      hasattr(jax, "ffi"), "The pages are written for JAX 0.5 and later.")
  @jtu.run_on_devices("cpu")
  def test_code(self, page):
    folder = self.create_tempdir().full_path
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(folder)
    python = pathlib.Path("python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', "utf-8")
    python.chmod(0o755)
    self.addCleanup(jax_cond_patch.activate)
    self.namespace = {"__name__": page.stem}
    found = blocks(page)
    for (language, code), (following, shown) in zip(
        found, [*found[1:], ("", "")]):
      if language == "text":
        continue
      run = {"python": self.run_python, "sh": self.run_sh}[language]
      printed = run(code)
      if following == "text":
        self.assertMultiLineEqual(printed, shown)

  def test_every_error_has_its_part(self):
    """The texts name the parts of the page on errors, and each is named."""
    code = "".join(p.read_text("utf-8")
                   for p in (ROOT / "jax_cond_patch").rglob("*.py"))
    named = re.findall(r"docs/pages/errors\.md#([\w-]+)", code)
    page = (ROOT / "docs/pages/errors.md").read_text("utf-8")
    parts = re.findall(r"(?m)^## (.*)$", page)
    self.assertCountEqual(set(named), parts)

  def test_every_error_names_its_part(self):
    errors = re.compile("Error|Warning")
    unnamed = []
    for path in (ROOT / "jax_cond_patch").rglob("*.py"):
      if path.name == "demo.py":
        continue  # It raises the errors of a user's program.
      for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        # What argparse shows is about the command line alone.
        if (isinstance(node, ast.Call) and
            errors.search(ast.unparse(node.func)) and
            "Argument" not in ast.unparse(node.func)):
          text = ast.unparse(node)
          # JAX's own errors keep their text, and that of an error with another
          # one in it ends with this.
          if (re.search(r"['\"].* ", text) and not any(
              s in text for s in ("docs/pages/errors.md#", "{error}",
                                  "lax.platform_dependent"))):
            unnamed.append(f"{path.name}:{node.lineno}")
    self.assertEmpty(unnamed)

  def test_every_error_has_cause_and_remedy(self):
    page = (ROOT / "docs/pages/errors.md").read_text("utf-8")
    for part in page.split("\n## ")[1:]:
      self.assertIn("\n**Cause.**", part)
      self.assertIn("\n**Remedy.**", part)

  def test_every_page_is_in_the_navigation(self):
    settings = (ROOT / "docs/mkdocs.yml").read_text("utf-8")
    self.assertCountEqual(re.findall(r"(?m)^  - .*: (\S+\.md)$", settings),
                          [page.name for page in PAGES])


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
