"""Fills in what the pages take from the code, when MkDocs builds them."""
import importlib.util
import pathlib

_ROOT = pathlib.Path(__file__).parents[1]


def _releases():
  """Reads the supported releases, without importing JAX."""
  path = _ROOT / "jax_cond_patch/compat/releases.py"
  spec = importlib.util.spec_from_file_location("releases", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.RELEASES


def on_page_markdown(markdown, **kwargs):
  """Puts the table of releases where `<!-- releases -->` stands."""
  del kwargs
  rows = ["| JAX | era | Python of the tests |", "| --- | --- | --- |"]
  rows += [f"| {r.jax} | {r.era} | {r.python} |" for r in _releases()]
  return markdown.replace("<!-- releases -->", "\n".join(rows))
