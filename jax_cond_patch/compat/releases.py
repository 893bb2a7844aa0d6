"""The JAX releases that are supported. Imports neither JAX nor ours."""
from __future__ import annotations

import importlib.metadata
import typing

from packaging import version as packaging_version

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
  """
  jax: str
  era: Era
  python: str


RELEASES: tuple[Release, ...] = (
    Release("0.6.0", "added", "3.11"),
    Release("0.6.1", "native", "3.11"),
    Release("0.7.2", "native", "3.11"),
    Release("0.10.2", "native", "3.11"),
    Release("0.12.0.1", "native", "3.12"),
)


def find(jax_version: str) -> Release | None:
  """Returns the supported release with this version of JAX, or None."""
  parsed = packaging_version.parse(jax_version)
  for release in RELEASES:
    if packaging_version.parse(release.jax) == parsed:
      return release
  return None


def installed() -> str | None:
  """Returns the version of the JAX that is installed, or None.

  `jax.__version__` is not read, since this must not import JAX.
  """
  try:
    return importlib.metadata.version("jax")
  except importlib.metadata.PackageNotFoundError:
    return None


def supported() -> str:
  """Lists the supported versions, for a message."""
  return ", ".join(release.jax for release in RELEASES)
