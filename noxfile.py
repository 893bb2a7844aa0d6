"""Runs the tests on every supported release of JAX, and the checkers."""
import glob
import importlib.util
import os
import pathlib

import nox

nox.options.default_venv_backend = "uv"
# A release whose Python is not on this machine is skipped, and nox says so.
nox.options.error_on_missing_interpreters = False
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
# pyenv's interpreters need not be on the path, where nox and uv look for them.
_PYENV = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
os.environ["PATH"] = os.pathsep.join(
    [os.environ["PATH"], *sorted(glob.glob(f"{_PYENV}/versions/*/bin"))])

_REPORTS = pathlib.Path(".nox/reports")
_MEASURED = pathlib.Path(".nox/measured")

_VERSIONS = """
import platform
from importlib.metadata import version
print(f"JAX {version('jax')}, jaxlib {version('jaxlib')}, "
      f"Python {platform.python_version()}", end="")
"""


def _table():
  """Reads the supported releases, without importing JAX."""
  path = pathlib.Path(__file__).parent / "jax_cond_patch/compat/releases.py"
  spec = importlib.util.spec_from_file_location("releases", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.RELEASES


# One session a release, with the Python that the table gives.
_on_each_release = nox.parametrize(
    "python,release", [(r.python, r) for r in _table()],
    ids=[r.jax for r in _table()])


@nox.session
@_on_each_release
def releases(session, release):
  """Runs the tests on one release: `nox -s 'releases(0.6.0)'`."""
  session.install("-e", ".[tests]", f"jax=={release.jax}", *release.pins)
  _run_tests(session, _REPORTS / f"{release.jax}.xml", session.posargs)


def _run_tests(session, report, arguments):
  """Runs pytest, and leaves a report that names what was installed."""
  versions = session.run("python", "-c", _VERSIONS, silent=True)
  session.run("python", "-m", "pytest", f"--junitxml={report}", "-o",
              f"junit_suite_name={versions}", *arguments)


# What JAX does with the diffs too. The other tests are of what the package does
# alone, as docs/pages/patches.md says.
_ON_DIFFS = [f"tests/{name}_test.py" for name in (
    "patched", "lowering", "rules", "transformations", "several_platforms",
    "pallas", "property")]


@nox.session
@_on_each_release
def patched(session, release):
  """Runs the tests on a release with the diffs: `nox -s 'patched(0.6.0)'`."""
  session.install("-e", ".[tests]", f"jax=={release.jax}", *release.pins)
  packages = session.run(
      "python", "-c", "import sysconfig; "
      "print(sysconfig.get_paths()['purelib'], end='')", silent=True)
  session.run("python", "-m", "jax_cond_patch", "apply", packages)
  _run_tests(session, _REPORTS / f"patched-{release.jax}.xml",
             session.posargs or _ON_DIFFS)


@nox.session(python="3.14t")
def free_threaded(session):
  """Runs the tests on the newest release and Python without its lock."""
  newest = _table()[-1]
  session.install("-e", ".[tests]", f"jax=={newest.jax}", *newest.pins)
  _run_tests(session, _REPORTS / "free-threaded.xml", session.posargs)


@nox.session
def report(session):
  """Makes docs/releases.md from the reports of the sessions above."""
  session.install("packaging")
  session.run("python", "docs/releases.py", str(_REPORTS))


@nox.session(default=False)
@_on_each_release
def fuzz(session, release):
  """Runs random programs without and with the package: EXAMPLES [SEED]."""
  session.install("-e", ".[tests]", f"jax=={release.jax}", *release.pins)
  session.run("python", "tests/fuzz.py", *(session.posargs or ["10000"]))


@nox.session(default=False)
@_on_each_release
def upstream(session, release):
  """Runs JAX's own tests without and with the package: CHECKOUT [FILES]."""
  session.install("-e", ".[tests]", f"jax=={release.jax}", *release.pins,
                  "cloudpickle", "mpmath")
  # Most of the time is XLA's, which this is not about.
  session.run("python", "tests/upstream.py", "run", *session.posargs,
              env=dict(JAX_SKIP_SLOW_TESTS="1", JAX_NUM_GENERATED_CASES="1",
                       JAX_DISABLE_MOST_OPTIMIZATIONS="1"))


# Up to JAX 0.7.1 jax2tf makes graphs of TensorFlow's operations, too.
_JAX2TF = ("0.4.30", "0.6.0", "0.7.1", "0.10.2", "0.12.0.1")


@nox.session
@nox.parametrize(
    "python,release", [(r.python, r) for r in _table() if r.jax in _JAX2TF],
    ids=_JAX2TF)
def jax2tf(session, release):
  """Converts programs by jax2tf and runs them in TensorFlow."""
  session.install("-e", ".[tests]", f"jax=={release.jax}", *release.pins,
                  "tensorflow-cpu")
  session.run("python", "tests/jax2tf.py", env=dict(TF_CPP_MIN_LOG_LEVEL="3"))


@nox.session(default=False)
@_on_each_release
def benchmarks(session, release):
  """Measures costs on one release: `nox -s 'benchmarks(0.6.0)'`."""
  session.install("-e", ".[tests]", "pytest-benchmark", f"jax=={release.jax}",
                  *release.pins)
  result = (_MEASURED / f"{release.jax}.json").absolute()
  result.parent.mkdir(parents=True, exist_ok=True)
  session.run("python", "-m", "pytest", "-c", "benchmarks/pytest.ini",
              "--rootdir=benchmarks", "benchmarks",
              f"--benchmark-json={result}", *session.posargs)


@nox.session(default=False)
def costs(session):
  """Makes the table and the plot of docs/pages/costs.md from these."""
  session.install("matplotlib")
  session.run("python", "benchmarks/report.py",
              *map(str, sorted(_MEASURED.glob("*.json"))))


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
