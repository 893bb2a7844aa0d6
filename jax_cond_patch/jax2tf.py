"""Conversion by `jax2tf` to a graph of TensorFlow's operations.

That is what it makes up to JAX 0.7.1 if it is told to serialize no StableHLO. A
graph is for no platform, so it gets what runs on JAX's own here: that is also
what is serialized, if no platforms are named.
"""
from __future__ import annotations

from collections.abc import Callable
import functools

from jax._src import core
from jax._src import source_info_util
import numpy as np

from jax_cond_patch import pinning
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch import resolution
from jax_cond_patch.compat import internals


def bind_with_trace(primitive: core.Primitive, convert: Callable) -> Callable:
  """Makes the method of a primitive that TensorFlow has nothing like.

  The trace of the conversion, and its rules, are not imported with JAX.

  Args:
    primitive: the primitive.
    convert: evaluates it, given its arguments and params; what it binds is
      converted. Returns None for what is to be converted as it is.

  Returns:
    The method.
  """
  original = functools.partial(type(primitive).bind_with_trace, primitive)

  def converting_bind_with_trace(trace, args, params):
    if type(trace).__name__ == "TensorFlowTrace":
      with internals.current_trace(trace):
        converted = convert(*args, **params)
      if converted is not None:
        return converted
    return original(trace, args, params)

  return converting_bind_with_trace


def _owner(branches_platforms: platforms_lib.BranchesPlatforms) -> int:
  platform = internals.default_platform()
  owner = platforms_lib.owner(branches_platforms, platform)
  if owner is None:
    raise NotImplementedError(resolution.no_branch(
        branches_platforms, (platform,), source_info_util.current()))
  return owner


def cond(index, *operands, branches, **params):
  """The branch that runs here, of a platform conditional."""
  del index
  platforms = params.get(internals.PLATFORMS)
  if platforms is None:
    return None
  return core.jaxpr_as_fun(branches[_owner(platforms)])(*operands)


def platform_index(**params) -> np.int32:
  """The index of the branch that runs here."""
  return np.int32(_owner(internals.indexed_platforms(params)))


def pinned(platforms) -> list:
  """Nothing, if the program was traced for what runs here."""
  pinning.check(platforms, (internals.default_platform(),),
                source_info_util.current())
  return []


def deferred_error(*_, deferred, **__):
  """Raises it: all that is converted runs here."""
  raise deferred.exception()
