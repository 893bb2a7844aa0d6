"""What this package needs of JAX's internals, the same on every release.

A split asks for the feature, not for the number, wherever it can be seen, and
names the upstream change that made it needed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import inspect
import types
from typing import Any

import jax
from jax._src import core
from jax._src import dispatch
from jax._src import effects as effects_lib
from jax._src import source_info_util
from jax._src import traceback_util
from jax._src import util
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import conditionals
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.state.types import AbstractRef
import numpy as np

cond_p = conditionals.cond_p
platform_index_p = conditionals.platform_index_p

# https://github.com/jax-ml/jax/commit/f2121a72fc (JAX 0.6.1) added the param
# `branches_platforms` to `cond_p`, and `_switch_internal`, which takes it.
native = hasattr(conditionals, "_switch_internal")

# The param of `cond_p` that holds one entry per branch: a tuple of the names of
# its platforms, or None for the default branch. Rules of JAX and of others go
# on finding it under upstream's name where JAX has one.
PLATFORMS = "branches_platforms" if native else "platforms"


def platform_index_params(branches_platforms) -> dict[str, Any]:
  """The params with which `platform_index_p` indexes these branches."""
  if native:
    return dict(platforms=branches_platforms)
  named = tuple(ps for ps in branches_platforms if ps is not None)
  return dict(platforms=named, has_default=None in branches_platforms)


def indexed_platforms(params: dict[str, Any]):
  """The branches' platforms of a `platform_index_p` with these params."""
  if native:
    return params["platforms"]
  default = (None,) if params["has_default"] else ()
  return (*params["platforms"], *default)


def bind_platform_index(branches_platforms):
  """Returns the index of the branch for the platform it is lowered for.

  Args:
    branches_platforms: the platforms of each branch.

  Returns:
    An int32 scalar.
  """
  return platform_index_p.bind(**platform_index_params(branches_platforms))


# Functions and their globals.

def undecorated(fun: Callable) -> types.FunctionType:
  """Returns the Python function under JAX's decorators."""
  fun = inspect.unwrap(fun)
  assert isinstance(fun, types.FunctionType), fun
  return fun


def with_globals(fun: types.FunctionType, **names) -> types.FunctionType:
  """Returns a function whose code sees other values under these names."""
  rebound = types.FunctionType(
      fun.__code__, {**fun.__globals__, **names}, fun.__name__,
      fun.__defaults__, fun.__closure__)
  rebound.__kwdefaults__ = fun.__kwdefaults__
  return rebound


# Jaxprs.

def is_concrete(x) -> bool:
  return not isinstance(x, core.Tracer)


def map_jaxpr(fun: Callable, jaxpr):
  """Applies a function of a `core.Jaxpr` below a `ClosedJaxpr`, if it is one.

  JAX 0.11 merged the two classes:
  https://github.com/jax-ml/jax/commit/10ae8c8be1.
  """
  if isinstance(jaxpr, core.Jaxpr):
    return fun(jaxpr)
  return core.ClosedJaxpr(fun(jaxpr.jaxpr), jaxpr.consts)


def is_jaxpr(x) -> bool:
  closed_jaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)
  return isinstance(x, (core.Jaxpr, closed_jaxpr))


def open_jaxpr(jaxpr) -> core.Jaxpr:
  """Returns the `core.Jaxpr` of a `ClosedJaxpr`, if it is one."""
  return jaxpr if isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


def rename_input_effects(effects, rename: Callable):
  """Renames the variables that the effects of an equation are about.

  Up to JAX 0.10.1 they count the equation's inputs instead:
  https://github.com/jax-ml/jax/commit/7da2a6cb29.
  """
  if not any(isinstance(getattr(e, "input", None), core.Var) for e in effects):
    return effects
  return {e.replace(rename(e.input))
          if isinstance(getattr(e, "input", None), core.Var) else e
          for e in effects}


def is_input_effect(effect) -> bool:
  return isinstance(effect, effects_lib.JaxprInputEffect)


def is_ref(aval) -> bool:
  return isinstance(aval, AbstractRef)


def cotangent_aval(aval):
  """The type of the cotangents of a linear value.

  It differs from that of the value with shardings that are unreduced:
  https://github.com/jax-ml/jax/commit/22ceb68775, renamed in
  https://github.com/jax-ml/jax/commit/8d439f50bb.
  """
  for name in ("to_ct_aval", "to_cotangent_aval"):
    if hasattr(aval, name):
      return getattr(aval, name)()
  return aval


def compute_type(eqn: core.JaxprEqn) -> str | None:
  return getattr(getattr(eqn, "ctx", None), "compute_type", None)


def platforms_for_eqn_ctx(eqn_ctx) -> tuple[str, ...]:
  """The platforms that a `compute_on` region is lowered for, or ()."""
  if not hasattr(mlir, "_platforms_for_eqn_ctx"):
    return ()
  return tuple(mlir._platforms_for_eqn_ctx(eqn_ctx))


def user_location(source_info) -> str:
  """Says where in the user's code an equation was traced.

  An equation that JAX runs at once has no frame of the user's since JAX 0.9.1,
  https://github.com/jax-ml/jax/commit/6f2f0f362d; then it is traced from there.
  """
  return (source_info_util.summarize(source_info) or
          source_info_util.summarize(source_info_util.current()))


def jaxpr_eqn_recipe(trace, in_tracers, out_tracers, primitive, params, effects,
                     source_info):
  """`pe.new_eqn_recipe`, which takes the trace since JAX 0.6.2.

  https://github.com/jax-ml/jax/commit/859e120fdd
  """
  args = (in_tracers, out_tracers, primitive, params, effects, source_info)
  if "trace" in inspect.signature(pe.new_eqn_recipe).parameters:
    args = (trace, *args)
  return pe.new_eqn_recipe(*args)


def remat_rules() -> dict:
  """The rules of rematerialization by tracing, since JAX 0.10.2.

  https://github.com/jax-ml/jax/commit/bf1e6d9b49
  """
  try:
    from jax._src.interpreters import remat
  except ImportError:
    return {}
  return remat.rules


def hide_frames(path: str) -> None:
  """Takes the files under a path for JAX's own in tracebacks and locations."""
  traceback_util.register_exclusion(path)
  source_info_util.register_exclusion(path)


def weakref_lru_cache(fun: Callable) -> Callable:
  return util.weakref_lru_cache(fun)


def clear_caches() -> None:
  """Forgets all that JAX has traced, lowered and compiled."""
  jax.clear_caches()
  # JAX 0.12 copies the rules of a primitive into a second one, `ad.vjp_node`,
  # and keeps it in a cache that `jax.clear_caches` does not know.
  from jax._src.interpreters import ad
  if hasattr(ad, "vjp_node"):
    ad.vjp_node.cache_clear()


# Lowering.

def lowering_rule_entry(rule: Callable):
  """Makes the value under which a rule stands in `mlir._lowerings`.

  It was the bare rule up to JAX 0.6.2:
  https://github.com/jax-ml/jax/commit/0fd2074ca0.
  """
  if hasattr(mlir, "LoweringRuleEntry"):
    return mlir.LoweringRuleEntry(rule, inline=True)
  return rule


def lower_for(fun: Callable, args: Sequence, platform: str) -> None:
  """Lowers a function for a platform, whatever devices there are.

  That is public since JAX 0.4.30:
  https://github.com/jax-ml/jax/commit/6ba16e0348
  """
  jitted = jax.jit(fun)
  if hasattr(jitted, "trace"):
    jitted.trace(*args).lower(lowering_platforms=(platform,))
  else:
    jitted.lower(*args, _experimental_lowering_parameters=(
        mlir.LoweringParameters(platforms=(platform,))))


def has_lowering_rule(primitive: core.Primitive, platform: str) -> bool:
  return (primitive in mlir._lowerings or
          primitive in mlir._platform_specific_lowerings.get(platform, ()))


def uncacheable_primitives() -> set | None:
  """The primitives whose rules JAX 0.7 and later does not make functions of."""
  return getattr(mlir, "_uncacheable_primitives", None)


def lowering_platform(shardings: Iterable, jaxpr: core.Jaxpr,
                      context_mesh) -> str:
  """The platform that `pxla.lower_sharding_computation` lowers for by itself.

  Args:
    shardings: the shardings of the inputs and outputs of a computation.
    jaxpr: the computation.
    context_mesh: the mesh around it, None or an empty mesh if there is none.

  Returns:
    The name of the platform.
  """
  if context_mesh is not None and not context_mesh.empty:
    for device in getattr(context_mesh, "_flat_devices_tuple", None) or ():
      return _platform_of(device)
  # With one platform there is nothing to find out, and this takes time.
  inner = (dispatch.get_intermediate_shardings(jaxpr)
           if len(xla_bridge.backends()) > 1 else ())
  for sharding in (*shardings, *(s for s, _ in inner)):
    if isinstance(sharding, jax.sharding.Sharding):
      try:
        devices = sharding._device_assignment
      except ValueError:  # an abstract mesh has no devices
        continue
      return _platform_of(devices[0])
  device = jax.config.jax_default_device
  if device is not None and not isinstance(device, str):
    return _platform_of(device)
  backend = xla_bridge.get_backend(device)
  return getattr(backend, "_raw_platform", backend.platform)


def _platform_of(device) -> str:
  client = device.client
  return getattr(client, "_raw_platform", client.platform)


def ordered_effects(effects) -> list:
  return list(effects_lib.ordered_effects.filter_in(effects))


def flat_ir_types(module_context, avals: Sequence) -> tuple[list, Callable]:
  """The IR types of some avals in one list, and what undoes it for values.

  The helpers for this moved at JAX 0.4.31, 0.10.0 and 0.10.2:
  https://github.com/jax-ml/jax/commit/3d5784a343,
  https://github.com/jax-ml/jax/commit/99a8f4b908,
  https://github.com/jax-ml/jax/commit/b8105546a9.
  """
  if hasattr(mlir, "_aval_to_ir_types"):
    types_ = [mlir._aval_to_ir_types(module_context, a) for a in avals]
  else:
    types_ = [mlir.aval_to_ir_type(a) for a in avals]
  if hasattr(mlir, "ir_tree_registry"):
    flat, treedef = mlir.ir_tree_registry.flatten(types_)
    return flat, treedef.unflatten
  return (mlir.flatten_ir_types(types_),
          lambda values: mlir.unflatten_ir_values_like_types(values, types_))


def flat_ir_values(values) -> list[ir.Value]:
  if hasattr(mlir, "ir_tree_registry"):
    return mlir.ir_tree_registry.flatten(list(values))[0]
  return mlir.flatten_ir_values(values)


def token_set(tokens: dict) -> mlir.TokenSet:
  return mlir.TokenSet(tokens)


def with_sharding_in_types(ctx, values: Sequence, avals: Sequence) -> list:
  """Constrains the outputs of a `case`, as JAX does since 0.9.2.

  https://github.com/jax-ml/jax/commit/877ca7811a
  """
  if not hasattr(mlir, "lower_with_sharding_in_types"):
    return list(values)
  return [mlir.lower_with_sharding_in_types(ctx, v, a)
          for v, a in zip(values, avals)]


def _ir_consts(jaxpr) -> list:
  consts, constvars = jaxpr.consts, open_jaxpr(jaxpr).constvars
  if hasattr(mlir, "ir_consts"):
    return mlir.ir_consts(consts, [v.aval for v in constvars])
  return mlir._ir_consts(consts)


def lower_jaxpr_inline(ctx: mlir.LoweringRuleContext, jaxpr, tokens_in,
                       *args) -> tuple[Sequence, Any]:
  """Lowers a closed jaxpr at the insertion point, in a rule's context.

  Args:
    ctx: the context of the rule.
    jaxpr: the closed jaxpr.
    tokens_in: the tokens of the ordered effects.
    *args: the IR values of the inputs.

  Returns:
    The IR values of the outputs, and the tokens afterwards.
  """
  kwargs: dict[str, Any] = dict(dim_var_values=ctx.dim_var_values)
  # https://github.com/jax-ml/jax/commit/017509aec2 (0.7.1) and
  # https://github.com/jax-ml/jax/commit/6f2f0f362d (0.9.1)
  if hasattr(ctx, "const_lowering"):
    kwargs["const_lowering"] = ctx.const_lowering
  if "outer_traceback" in _jaxpr_subcomp_parameters:
    kwargs["outer_traceback"] = ctx.traceback
  return mlir.jaxpr_subcomp(
      ctx.module_context, open_jaxpr(jaxpr), ctx.name_stack, tokens_in,
      _ir_consts(jaxpr), *args, **kwargs)


_jaxpr_subcomp_parameters = frozenset(
    inspect.signature(mlir.jaxpr_subcomp).parameters)


def i32_constant(i: int) -> ir.Value:
  return mlir.ir_constant(np.int32(i))


def convert_integer(value: ir.Value, type_: ir.Type) -> ir.Value:
  return value if value.type == type_ else hlo.convert(type_, value)


def i32_type() -> ir.Type:
  return ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
