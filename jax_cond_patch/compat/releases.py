"""The JAX releases that are supported. Imports neither JAX nor ours."""
from __future__ import annotations

import sys
import typing

# In the added era JAX has no param on `cond_p` that names platforms, and this
# package adds `platforms`. In the native era JAX has `branches_platforms`,
# since https://github.com/jax-ml/jax/commit/f2121a72fc (JAX 0.6.1).
Era = typing.Literal["added", "native"]


class Release(typing.NamedTuple):
  """A supported release of JAX.

  Attributes:
    jax: its version.
    era: whether JAX has a platforms param of its own.
    python: the version of Python that the tests use, as "major.minor".
    ci: whether it is in the subset that continuous integration tests: the
      releases at which the internals that this package uses have changed.
    pins: what else must be asked for with it, as requirements.
  """
  jax: str
  era: Era
  python: str = "3.11"
  ci: bool = False
  pins: tuple[str, ...] = ()


# JAX requires its jaxlib by itself since 0.4.30. Up to 0.4.25 that is built for
# numpy 1, and up to 0.4.23 JAX uses `scipy.linalg.tril`, gone in scipy 1.13.
_NUMPY_1 = "numpy<2"
_SCIPY_1_12 = "scipy<1.13"

RELEASES: tuple[Release, ...] = (
    Release("0.4.21", "added", ci=True,
            pins=("jaxlib==0.4.21", _NUMPY_1, _SCIPY_1_12)),
    Release("0.4.22", "added", pins=("jaxlib==0.4.22", _NUMPY_1, _SCIPY_1_12)),
    Release("0.4.23", "added", pins=("jaxlib==0.4.23", _NUMPY_1, _SCIPY_1_12)),
    Release("0.4.24", "added", pins=("jaxlib==0.4.24", _NUMPY_1)),
    Release("0.4.25", "added", pins=("jaxlib==0.4.25", _NUMPY_1)),
    Release("0.4.26", "added", ci=True, pins=("jaxlib==0.4.26",)),
    Release("0.4.27", "added", pins=("jaxlib==0.4.27",)),
    Release("0.4.28", "added", pins=("jaxlib==0.4.28",)),
    Release("0.4.29", "added", pins=("jaxlib==0.4.29",)),
    Release("0.4.30", "added", ci=True),
    Release("0.4.31", "added", ci=True),
    Release("0.4.33", "added"),
    Release("0.4.34", "added", ci=True),
    Release("0.4.35", "added"),
    Release("0.4.36", "added", ci=True),
    Release("0.4.37", "added", pins=("jaxlib==0.4.36",)),
    Release("0.4.38", "added"),
    Release("0.5.0", "added"),
    Release("0.5.1", "added", ci=True),
    Release("0.5.2", "added"),
    Release("0.5.3", "added"),
    Release("0.6.0", "added", ci=True),
    Release("0.6.1", "native", ci=True),
    Release("0.6.2", "native", ci=True),
    Release("0.7.0", "native", ci=True),
    Release("0.7.1", "native", ci=True),
    Release("0.7.2", "native", ci=True),
    Release("0.8.0", "native"),
    Release("0.8.1", "native"),
    Release("0.8.2", "native", ci=True),
    Release("0.8.3", "native"),
    Release("0.9.0", "native"),
    Release("0.9.0.1", "native"),
    Release("0.9.1", "native", ci=True),
    Release("0.9.2", "native"),
    Release("0.10.0", "native", ci=True),
    Release("0.10.1", "native"),
    Release("0.10.2", "native"),
    Release("0.11.0", "native", "3.12", ci=True),
    Release("0.11.1", "native", "3.12", ci=True),
    Release("0.11.2", "native", "3.12"),
    Release("0.12.0", "native", "3.12"),
    Release("0.12.0.1", "native", "3.12", ci=True),
)


def find(jax_version: str) -> Release | None:
  """Returns the supported release with this version of JAX, or None.

  A local version (`0.6.0+cuda12`) is a build of the release.
  """
  for release in RELEASES:
    if release.jax == jax_version:
      return release
  public = _parse(_parse(jax_version).public)
  for release in RELEASES:
    if _parse(release.jax) == public:
      return release
  return None


def _parse(version: str):
  # Imported here for the time that it takes; most versions stand in the table.
  from packaging import version as packaging_version
  return packaging_version.parse(version)


def is_newer(jax_version: str) -> bool:
  """Whether this version of JAX comes after all the supported releases."""
  newest = max(_parse(release.jax) for release in RELEASES)
  return _parse(_parse(jax_version).public) > newest


def installed(distribution: str = "jax") -> str | None:
  """Returns the version of the JAX that is installed, or None.

  It is asked itself if it is imported, but this does not import it.
  """
  version = getattr(sys.modules.get(distribution), "__version__", None)
  if version is not None:
    return version
  import importlib.metadata  # It takes longer than all the rest.
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return None


def supported() -> str:
  """Names the supported versions, for a message."""
  versions = sorted(
      (release.jax for release in RELEASES), key=_parse)
  return f"{versions[0]} to {versions[-1]}"
