"""Patches JAX in a Python that `python -m jax_cond_patch run` has started.

Python imports this at its start, since the folder is on PYTHONPATH. JAX is not
imported before the program does so itself: it reads the environment when it is
imported, and many programs need no JAX at all.
"""
import importlib
import importlib.abc
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_FOLDER)


class _PatchingFinder(importlib.abc.MetaPathFinder):
  """Imports this jax_cond_patch as soon as JAX has been imported."""

  def find_spec(self, name, path=None, target=None):
    if name == "jax_cond_patch":
      return importlib.util.spec_from_file_location(
          name, os.path.join(_PACKAGE, "__init__.py"),
          submodule_search_locations=[_PACKAGE])
    if name != "jax":
      return None
    others = [finder for finder in sys.meta_path if finder is not self]
    specs = (finder.find_spec(name, path, target) for finder in others)
    spec = next(filter(None, specs), None)
    if spec is not None and spec.loader is not None:
      exec_module = spec.loader.exec_module

      def exec_module_and_patch(module):
        exec_module(module)
        import jax_cond_patch  # noqa: F401

      spec.loader.exec_module = exec_module_and_patch
    return spec


def _leave_environment():
  """Keeps the patch from child processes, unless they are to have it."""
  if os.environ.get("JAX_COND_PATCH_RUN") != "children":
    os.environ.pop("JAX_COND_PATCH_RUN", None)
    _, *others = os.environ["PYTHONPATH"].split(os.pathsep)
    if others:
      os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
      del os.environ["PYTHONPATH"]


def _import_hidden_sitecustomize():
  """Imports the `sitecustomize` that Python would have found without this."""
  sys.path.remove(_FOLDER)
  this = sys.modules.pop(__name__)
  try:
    importlib.import_module(__name__)
  except ImportError as error:
    if error.name != __name__:
      raise
  finally:
    sys.modules.setdefault(__name__, this)


sys.meta_path.insert(0, _PatchingFinder())
_leave_environment()
_import_hidden_sitecustomize()
