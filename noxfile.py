"""Runs the tests on every supported release of JAX, and the checkers."""
import importlib.util
import pathlib

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True


def _releases():
  """Reads the supported releases, without importing JAX."""
  path = pathlib.Path(__file__).parent / "jax_cond_patch/compat/releases.py"
  spec = importlib.util.spec_from_file_location("releases", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.RELEASES


@nox.session
@nox.parametrize(
    "python,jax", [(r.python, r.jax) for r in _releases()],
    ids=[r.jax for r in _releases()])
def tests(session, jax):
  """Runs the tests on one release."""
  session.install("-e", ".[tests]", f"jax=={jax}")
  session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session):
  """Runs ruff."""
  session.install("ruff")
  session.run("ruff", "check", ".")


@nox.session
def docs(session):
  """Builds the documentation; a warning is an error."""
  session.install("mkdocs")
  session.run("mkdocs", "build", "--strict", "--config-file",
              "docs/mkdocs.yml", "--site-dir",
              session.posargs[0] if session.posargs else
              str(pathlib.Path(session.create_tmp()).absolute()))


@nox.session
def typecheck(session):
  """Runs mypy."""
  session.install("mypy", "packaging")
  session.run("mypy")
