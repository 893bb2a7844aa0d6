"""Which branch of a platform conditional runs on which platform.

Pure functions of platform names; nothing here imports JAX.
"""
from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import NamedTuple

# One entry per branch: the names of its platforms, or None for the default
# branch, which is the last one. This is the `platforms` param of `cond_p`.
BranchesPlatforms = tuple["tuple[str, ...] | None", ...]

# What the body of a kernel is lowered for: the names that its branches may have
# there, the most specific first.
KernelPlatform = tuple[str, ...]

# A lowering platform, or what a kernel is lowered for.
Platform = str | KernelPlatform


def kernel_platform(language: str, platform: str) -> KernelPlatform:
  """The names that choose a branch in the body of a kernel.

  Args:
    language: "mosaic", "mosaic_gpu" or "triton".
    platform: the lowering platform of the module that it is in.

  Returns:
    The language, and on a GPU the platform also. Not on a TPU: there JAX picks
    the branch for "mosaic" or else the default one, since JAX 0.5.0.
  """
  return (language,) if language == "mosaic" else (language, platform)


def owner(branches_platforms: BranchesPlatforms,
          platform: Platform) -> int | None:
  """Finds the branch that runs on a platform.

  Args:
    branches_platforms: the platforms of each branch.
    platform: a lowering platform, or what a kernel is lowered for.

  Returns:
    The index of the first branch that names `platform`, or else of the default
    branch, or None if there is neither.
  """
  for name in (platform,) if isinstance(platform, str) else platform:
    for branch, names in enumerate(branches_platforms):
      if names is not None and name in names:
        return branch
  default = len(branches_platforms) - 1
  return default if None in branches_platforms else None


class Reachable(NamedTuple):
  """The branches that a set of lowering platforms can reach.

  Attributes:
    branches: the indices of the branches that own a lowering platform, in
      order.
    owned: for each of these, the lowering platforms it owns, in the order of
      the lowering platforms.
    missing: the lowering platforms without a branch.
  """
  branches: tuple[int, ...]
  owned: tuple[tuple[str, ...], ...]
  missing: tuple[str, ...]


@functools.cache
def reachable(branches_platforms: BranchesPlatforms,
              lowering_platforms: Sequence[Platform]
              ) -> Reachable:
  """Finds the branches that are reached from any of the lowering platforms.

  Args:
    branches_platforms: the platforms of each branch.
    lowering_platforms: the platforms that a module is lowered for.

  Returns:
    A `Reachable`.
  """
  owned: dict[int, list[str]] = {}
  missing = []
  for platform in lowering_platforms:
    branch = owner(branches_platforms, platform)
    if not isinstance(platform, str):
      platform = platform[0]
    if branch is None:
      missing.append(platform)
    else:
      owned.setdefault(branch, []).append(platform)
  branches = tuple(sorted(owned))
  return Reachable(branches, tuple(tuple(owned[b]) for b in branches),
                   tuple(missing))


def quote(names: Sequence[str]) -> str:
  """Lists the names of platforms, for a message."""
  return ", ".join(map(repr, names))


def describe(branches_platforms: BranchesPlatforms) -> str:
  """Lists the platforms that have a branch, for a message."""
  names = [repr(p) for ps in branches_platforms for p in ps or ()]
  if None in branches_platforms:
    names.append("a default")
  return ", ".join(names) if names else "none"
