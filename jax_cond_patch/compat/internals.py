"""What this package needs of JAX's internals, the same on every release.

A split asks for the feature, not for the number, wherever it can be seen, and
names the upstream change that made it needed.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import pathlib
import sys
import types
from typing import Any

import jax
from jax._src import ad_util
from jax._src import config
from jax._src import core
from jax._src import dispatch
from jax._src import effects as effects_lib
from jax._src import pjit
from jax._src import sharding_impls
from jax._src import source_info_util
from jax._src import traceback_util
from jax._src import util
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters import pxla
from jax._src.lax import convolution
from jax._src.lax import lax as lax_internal
from jax._src.lax import slicing
from jax._src.lax import windowed_reductions
from jax._src.lax.control_flow import common
from jax._src.lax.control_flow import conditionals
from jax._src.lib import version as jaxlib_version
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.state import discharge
from jax._src.state.types import AbstractRef
import numpy as np

cond_p = conditionals.cond_p
platform_index_p = conditionals.platform_index_p
# https://github.com/jax-ml/jax/commit/d585aecc0e (JAX 0.7.0) renamed it.
jit_p = getattr(pjit, "jit_p", None) or pjit.pjit_p

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
  index = platform_index_p.bind(**platform_index_params(branches_platforms))
  # Alone jet, which has no rule for conditionals, puts an index that is known
  # into a tracer. That of shard_map can't be asked for its value up to 0.6.0.
  is_of_jet = type(index).__name__ == "JetTracer"
  return core.full_lower(index) if is_of_jet else index


def takes(fun: Callable, name: str) -> bool:
  """Whether a function has a parameter of this name."""
  return name in inspect.signature(fun).parameters


# Functions and their globals.

def undecorated(fun: Callable) -> types.FunctionType:
  """Returns the Python function under JAX's decorators."""
  fun = inspect.unwrap(fun)
  assert isinstance(fun, types.FunctionType), fun
  return fun


has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()


@functools.cache
def _as_nested(code: types.CodeType) -> types.CodeType:
  """Code for a function that is freed as soon as nothing refers to it.

  Free-threaded Python leaves others to its garbage collector, which does not
  see the reference of a call: where that is the only one, the function loses
  its globals as it runs. https://github.com/python/cpython/issues/117376
  """
  return code.replace(co_flags=code.co_flags | inspect.CO_NESTED)


def with_globals(fun: types.FunctionType, **names) -> types.FunctionType:
  """Returns a function whose code sees other values under these names."""
  code = fun.__code__ if has_gil else _as_nested(fun.__code__)
  rebound = types.FunctionType(
      code, {**fun.__globals__, **names}, fun.__name__, fun.__defaults__,
      fun.__closure__)
  rebound.__kwdefaults__ = fun.__kwdefaults__
  return rebound


def has_strict_to_lojax() -> bool:
  """Whether `cond_p.to_lojax` refuses JAX's own param that holds platforms.

  From JAX 0.7.2 to 0.9.0.1: https://github.com/jax-ml/jax/commit/b8f172f49b.
  """
  rule = getattr(cond_p, "to_lojax", None)
  return rule is not None and all(
      p.kind is not inspect.Parameter.VAR_KEYWORD
      for p in inspect.signature(rule).parameters.values())


# Jaxprs.

def linearization_inputs(args: Sequence) -> tuple[Sequence[bool], Sequence]:
  """Which tangents are not zero, and the primals, of a linearization rule.

  There is an argument before these since JAX 0.9.1:
  https://github.com/jax-ml/jax/commit/79f3519e22.
  """
  i = next(i for i, x in enumerate(args) if isinstance(x, (tuple, list)))
  return args[i], args[i + 1:]


def is_concrete(x) -> bool:
  return not isinstance(x, core.Tracer)


# JAX 0.11 merged the two classes:
# https://github.com/jax-ml/jax/commit/10ae8c8be1.
has_closed_jaxprs = getattr(core, "ClosedJaxpr", core.Jaxpr) is not core.Jaxpr


def map_jaxpr(fun: Callable, jaxpr):
  """Applies a function to the `core.Jaxpr` of a `ClosedJaxpr`, if it is one."""
  if isinstance(jaxpr, core.Jaxpr):
    return fun(jaxpr)
  mapped = fun(jaxpr.jaxpr)
  if mapped is jaxpr.jaxpr:
    return jaxpr
  return core.ClosedJaxpr(mapped, jaxpr.consts)


_JAXPR_TYPES = (core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr))


def is_jaxpr(x) -> bool:
  return isinstance(x, _JAXPR_TYPES)


def open_jaxpr(jaxpr) -> core.Jaxpr:
  """Returns the `core.Jaxpr` of a `ClosedJaxpr`, if it is one."""
  return jaxpr if isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


@functools.cache
def lax_primitives() -> frozenset[core.Primitive]:
  """The primitives of `jax.lax` that have no jaxprs."""
  return frozenset(
      x for module in (lax_internal, slicing, windowed_reductions, convolution,
                       ad_util)
      for x in vars(module).values() if isinstance(x, core.Primitive))


def jaxprs_in_params(params: dict[str, Any]) -> list:
  """As `core.jaxprs_in_params`, but with the constants of the jaxprs."""
  found: list = []
  for param in params.values():  # of every equation: it is to be fast
    if isinstance(param, (tuple, list)):
      found.extend(x for x in param if isinstance(x, _JAXPR_TYPES))
    elif isinstance(param, _JAXPR_TYPES):
      found.append(param)
  return found


def jaxpr_of(eqn: core.JaxprEqn, like: core.Jaxpr):
  """Returns a closed jaxpr of one equation, with its inputs and outputs.

  Args:
    eqn: the equation.
    like: a jaxpr of the same place in the user's code.
  """
  new_var = core.gensym()
  invars = [new_var(x.aval) for x in eqn.invars]
  outvars = [new_var(v.aval) for v in eqn.outvars]
  jaxpr = like.replace(
      constvars=[], invars=invars, outvars=outvars, effects=eqn.effects,
      eqns=[eqn.replace(invars=invars, outvars=outvars)])
  return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def rename_input_effects(effects, names: Mapping):
  """Renames the variables that the effects of an equation are about.

  Up to JAX 0.10.1 they count the equation's inputs instead:
  https://github.com/jax-ml/jax/commit/7da2a6cb29.
  """
  if not effects or not any(
      isinstance(getattr(e, "input", None), core.Var) for e in effects):
    return effects
  return {e.replace(names.get(e.input, e.input))
          if isinstance(getattr(e, "input", None), core.Var) else e
          for e in effects}


def is_input_effect(effect) -> bool:
  return isinstance(effect, effects_lib.JaxprInputEffect)


def is_ref(aval) -> bool:
  return isinstance(aval, AbstractRef)


def params_with_operand(params: dict[str, Any]) -> dict[str, Any]:
  """The params of a conditional with one more operand, before the others.

  Up to JAX 0.4.30 they say of each operand whether it is linear:
  https://github.com/jax-ml/jax/commit/6becf716f3.
  """
  if "linear" in params:
    return {**params, "linear": (False, *params["linear"])}
  return params


def tangent_aval(aval):
  """The type of the tangents of a value.

  https://github.com/jax-ml/jax/commit/018189491b (0.4.34) renamed it.
  """
  if hasattr(aval, "to_tangent_aval"):
    return aval.to_tangent_aval()
  return aval.at_least_vspace()


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


def discharged(jaxpr: core.Jaxpr):
  """A jaxpr as a closed jaxpr of the values of its references.

  Up to JAX 0.7.0; it is not needed on later ones.
  """
  return core.ClosedJaxpr(*discharge.discharge_state(jaxpr, ()))


def loop_arity(eqn: core.JaxprEqn) -> tuple[int, int]:
  """How many constants the body of a `scan` or `while` has, and its carry.

  https://github.com/jax-ml/jax/commit/08958bdfe2 (after JAX 0.11.0) put those
  of `scan` into one param.
  """
  if eqn.primitive.name == "while":
    consts = eqn.params["body_nconsts"]
    return consts, len(eqn.invars) - eqn.params["cond_nconsts"] - consts
  if "ft_in" in eqn.params:
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
    return consts, carry
  return eqn.params["num_consts"], eqn.params["num_carry"]


_FOLLOWED_EQUATIONS = 50


def staged(tracer) -> tuple[Any, dict, Callable]:
  """The variable that a tracer stands for in the jaxpr that is being made.

  Args:
    tracer: a tracer.

  Returns:
    The variable, None if there is none; the equations that it was computed by
    last; and what gives the value of a constant, or None.
  """
  if not isinstance(tracer, pe.DynamicJaxprTracer):
    return None, {}, lambda var: None
  frame = tracer._trace.frame
  definitions = {}
  if hasattr(frame, "eqns"):
    for eqn in frame.eqns[-_FOLLOWED_EQUATIONS:]:
      definitions.update(dict.fromkeys(eqn.outvars, eqn))
    var = frame.tracer_to_var.get(id(tracer))
    return var, definitions, functools.partial(_constant, frame)
  # https://github.com/jax-ml/jax/commit/83c5251c5b (JAX 0.7.0) gave each tracer
  # its equation.
  pending = [tracer]
  while pending and len(definitions) < _FOLLOWED_EQUATIONS:
    eqn = pending.pop(0).parent
    if eqn is not None and eqn.outvars[0] not in definitions:
      definitions.update(dict.fromkeys(eqn.outvars, core.new_jaxpr_eqn(
          [t.val for t in eqn.in_tracers], eqn.outvars, eqn.primitive,
          eqn.params, eqn.effects)))
      pending.extend(eqn.in_tracers)
  return tracer.val, definitions, functools.partial(_constant, frame)


def _constant(frame, var):
  """The value of a constant of the jaxpr that is being made, or None.

  JAX 0.7.2 to 0.9.0.1 keep it with the value that the user gave:
  https://github.com/jax-ml/jax/commit/19a505501f.
  """
  value = frame.constvar_to_val.get(var)
  return getattr(value, "canonical", value)


def is_tracing_kernel() -> bool:
  """Whether the body of a Pallas kernel is being traced."""
  pallas_core = sys.modules.get("jax._src.pallas.core")
  if pallas_core is None:
    return False
  if hasattr(pallas_core, "_grid_context"):
    return pallas_core._grid_context.value is not None
  if hasattr(pallas_core, "_pallas_tracing_env"):
    return pallas_core._pallas_tracing_env.grid_context is not None
  # Pallas has no mark of it up to JAX 0.4.29, but a kernel has references:
  # https://github.com/jax-ml/jax/commit/9499de4358.
  mains = core.thread_local_state.trace_state.trace_stack.stack
  return any(is_ref(v.aval) for main in mains
             for frame in getattr(main, "jaxpr_stack", ())
             for v in frame.invars)


def current_trace(trace):
  """Makes a trace the one that primitives are bound under.

  Up to JAX 0.4.35 that is the trace of their operands:
  https://github.com/jax-ml/jax/commit/c36e1f7c1a.
  """
  if hasattr(core, "set_current_trace"):
    return core.set_current_trace(trace)
  return contextlib.nullcontext()


def import_wrappers() -> None:
  """Imports what would wrap a replacement, which then could not be undone."""
  # That is seen only once it is there, and it is in this release alone: from
  # https://github.com/jax-ml/jax/commit/d08e9a03d8 (JAX 0.4.26) to
  # https://github.com/jax-ml/jax/commit/dc2d8c13d0 (JAX 0.4.27).
  if jax.__version_info__ == (0, 4, 26):
    importlib.import_module("jax.experimental.key_reuse._core")


def has_graph_conversion() -> bool:
  """Whether `jax2tf` makes graphs of TensorFlow's operations.

  Up to JAX 0.7.1: https://github.com/jax-ml/jax/commit/fee0dd7727. Only the
  files tell, as the module needs TensorFlow.
  """
  jax2tf = pathlib.Path(jax.__file__).parent / "experimental/jax2tf"
  return (jax2tf / "impl_no_xla.py").exists()


def context_key(eqn: core.JaxprEqn):
  """What equations made in equal contexts have in common.

  Up to JAX 0.10.1 equal contexts are several objects:
  https://github.com/jax-ml/jax/commit/5d6e541c93. Up to 0.6.2 they differ for
  `==`: https://github.com/jax-ml/jax/commit/406fb6d527. That of later ones is
  not used, as values of their metadata are to be told apart by type, too.
  """
  ctx = getattr(eqn, "ctx", None)
  if ctx is None or hasattr(type(ctx), "_create"):
    return ctx
  names = getattr(ctx, "__slots__", None) or vars(ctx)
  # JAX 0.10.1 keeps what is in the others as `configs`, too:
  # https://github.com/jax-ml/jax/commit/46f75a2a31.
  return tuple(getattr(ctx, name) for name in names
               if name[0] != "_" and name != "configs")


def compute_type(eqn: core.JaxprEqn) -> str | None:
  return getattr(getattr(eqn, "ctx", None), "compute_type", None)


def platforms_for_eqn_ctx(eqn_ctx) -> tuple[str, ...]:
  """The platforms that a `compute_on` region is lowered for, or ()."""
  if (getattr(eqn_ctx, "compute_type", None) is None or
      not hasattr(mlir, "_platforms_for_eqn_ctx")):
    return ()
  return tuple(mlir._platforms_for_eqn_ctx(eqn_ctx))


# Kernels.

# Those that call a Pallas kernel, and can be lowered.
KERNELS = frozenset(["mpmd_map", "pallas_call"])


def is_kernel(eqn: core.JaxprEqn) -> bool:
  return eqn.primitive.name in KERNELS


def index_maps(eqn: core.JaxprEqn) -> list:
  """The jaxprs that say which block a kernel works on."""
  if "grid_mapping" not in eqn.params:
    return []
  grid_mapping = eqn.params["grid_mapping"]
  # Up to JAX 0.4.30 an operand that is not cut into blocks has none.
  return [m.index_map_jaxpr
          for m in getattr(grid_mapping, "block_mappings", ()) if m is not None]


def replace_index_maps(eqn: core.JaxprEqn, fun: Callable) -> core.JaxprEqn:
  """Applies a function to the jaxprs that say which block a kernel works on."""
  grid_mapping = eqn.params["grid_mapping"]
  block_mappings = tuple(
      m and m.replace(index_map_jaxpr=fun(m.index_map_jaxpr))
      for m in grid_mapping.block_mappings)
  grid_mapping = grid_mapping.replace(block_mappings=block_mappings)
  return eqn.replace(params={**eqn.params, "grid_mapping": grid_mapping})


def is_interpreted(eqn: core.JaxprEqn) -> bool:
  """Whether a kernel becomes operations of the module that it is in."""
  return bool(eqn.params["interpret"])


def kernel_language(eqn: core.JaxprEqn, platform: str) -> str | None:
  """What a kernel is lowered to on a platform.

  Args:
    eqn: the call of a kernel that is not interpreted.
    platform: the lowering platform.

  Returns:
    "mosaic" on a TPU, "mosaic_gpu" or "triton" on a GPU. None if JAX has no
    such lowering, or if it is one that somebody else has registered.
  """
  params_class = type(eqn.params.get("compiler_params"))
  if (dataclasses.is_dataclass(params_class) and
      not params_class.__module__.startswith("jax.")):
    return None
  if platform == "tpu":
    return "mosaic"
  if platform not in ("cuda", "rocm"):
    return None
  # The backend was a param up to JAX 0.9.0, and is told by the class of the
  # compiler's params since, or by a flag up to JAX 0.10.2 (and the flag too):
  # https://github.com/jax-ml/jax/commit/62816fe5c2.
  backend = eqn.params.get("backend")
  if backend is not None:
    return backend
  for language in ("mosaic_gpu", "triton"):
    if f".{language}." in params_class.__module__:
      return language
  if eqn.primitive.name == "mpmd_map":
    return "mosaic_gpu"
  use_mosaic_gpu = getattr(jax.config, "jax_pallas_use_mosaic_gpu", False)
  return "mosaic_gpu" if use_mosaic_gpu else "triton"


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
  if takes(pe.new_eqn_recipe, "trace"):
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


def export_module() -> str:
  """The name of the module that exports functions.

  It moved at JAX 0.4.24 and 0.4.29:
  https://github.com/jax-ml/jax/commit/69788d18b6,
  https://github.com/jax-ml/jax/commit/14d87d3bf7.
  """
  packages = pathlib.Path(jax.__file__).parent.parent
  names = ("jax._src.export._export", "jax.experimental.export._export",
           "jax.experimental.export.export")
  return next(name for name in names if
              (packages / f"{name.replace('.', '/')}.py").exists())


def hide_frames(path: str) -> None:
  """Takes the files under a path for JAX's own in tracebacks and locations."""
  traceback_util.register_exclusion(path)
  source_info_util.register_exclusion(path)


def weakref_lru_cache(fun: Callable) -> Callable:
  return util.weakref_lru_cache(fun)


def weakref_lru_cache_of_all_contexts(fun: Callable) -> Callable:
  """For a result that does not depend on JAX's settings.

  From JAX 0.4.36 to 0.5.2 these differ with each trace in a trace. That a cache
  can do without them is older: https://github.com/jax-ml/jax/commit/55589fbf41
  (JAX 0.4.31).
  """
  if "trace_context_in_key" in inspect.signature(
      util.weakref_lru_cache).parameters:
    return util.weakref_lru_cache(fun, trace_context_in_key=False)
  return weakref_lru_cache(fun)


def cache(max_size: int) -> Callable:
  return util.cache(max_size)


def trace_context():
  """What of JAX's settings a trace depends on; JAX has it in all cache keys."""
  # https://github.com/jax-ml/jax/commit/995bdaa912 (JAX 0.4.25) moved it.
  if hasattr(config, "trace_context"):
    return config.trace_context()
  return config.config._trace_context()


class _JittedFunctions:
  """Stands for `PjitFunctionCache` where `clear_all` may crash.

  From jaxlib 0.4.34 to 0.4.38 it does if another thread is making a jitted
  function: it takes those that are only half made.
  """

  @staticmethod
  def clear_all() -> None:
    jitted_function_type = type(jax.jit(lambda: None))
    for x in gc.get_referrers(jitted_function_type):
      # JAX sets this attribute when one is made.
      if type(x) is jitted_function_type and hasattr(x, "__wrapped__"):
        x._clear_cache()


def _clear_jax_caches() -> None:
  clear = jax.clear_caches
  if ((0, 4, 34) <= jaxlib_version < (0, 5) and
      len(sys._current_frames()) > 1):  # there are other threads
    extension = types.SimpleNamespace(PjitFunctionCache=_JittedFunctions)
    clear = with_globals(clear, xc=types.SimpleNamespace(_xla=extension))
  clear()


def clear_caches() -> None:
  """Forgets all that JAX has traced, lowered and compiled."""
  for _ in range(100):
    try:
      _clear_jax_caches()
      break
    except RuntimeError:  # Another thread has made a cache in the meantime.
      continue
  else:
    _clear_jax_caches()
  # It does not know this cache of the branches of conditionals up to 0.4.29:
  # https://github.com/jax-ml/jax/commit/6c34a56b87
  branches: Any = getattr(
      common, "_initial_style_jaxprs_with_common_consts", None)
  if hasattr(branches, "cache_clear"):
    branches.cache_clear()
  # JAX 0.12 copies the rules of a primitive to a second one, `ad.vjp_node`,
  # which it keeps. They are copied again; a new one each time would be a leak.
  from jax._src.interpreters import ad
  if hasattr(ad, "VJPNode"):
    for node in [p for p in pe.dce_rules if isinstance(p, ad.VJPNode)]:
      for rules in (ad.fancy_transposes, ad.primitive_transposes,
                    core.custom_typechecks):
        rules.pop(node, None)
        if node.prim in rules:
          rules[node] = rules[node.prim]


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
  if hasattr(mlir.LoweringParameters, "platforms"):
    jitted.lower(*args, _experimental_lowering_parameters=(
        mlir.LoweringParameters(platforms=(platform,))))
  else:
    jitted.trace(*args).lower(lowering_platforms=(platform,))


def has_lowering_rule(primitive: core.Primitive, platform: str) -> bool:
  return (primitive in mlir._lowerings or
          primitive in mlir._platform_specific_lowerings.get(platform, ()))


def uncacheable_primitives() -> set | None:
  """The primitives whose rules JAX 0.7 and later does not make functions of."""
  return getattr(mlir, "_uncacheable_primitives", None)


def requested_platforms(arguments: dict[str, Any]) -> tuple[str, ...] | None:
  """The platforms that `pxla.lower_sharding_computation` is told to lower for.

  They were among the lowering parameters up to JAX 0.4.29:
  https://github.com/jax-ml/jax/commit/6ba16e0348.

  Args:
    arguments: its arguments, by name.

  Returns:
    The names of the platforms, or None if it is to find out by itself.
  """
  if "lowering_platforms" in arguments:
    return arguments["lowering_platforms"]
  return getattr(arguments["lowering_parameters"], "platforms", None)


def drops_dead(arguments: dict[str, Any], jaxpr: core.Jaxpr) -> bool:
  """Whether `pxla.lower_sharding_computation` drops dead equations by itself.

  Args:
    arguments: its arguments, by name.
    jaxpr: the computation.
  """
  # Shardings that XLA chooses are gone since JAX 0.10.1:
  # https://github.com/jax-ml/jax/commit/c6c02034b7
  auto = getattr(sharding_impls, "AUTO", ())
  return (not arguments["keep_unused"] and
          not any(isinstance(sharding, auto) for sharding in (
              *arguments["in_shardings"], *arguments["out_shardings"])) and
          all(map(core.is_constant_shape,
                  {getattr(v.aval, "shape", ()) for v in jaxpr.invars})))


def forget_dead_code_search(jaxpr) -> None:
  """Lets go of a computation that `pxla.lower_sharding_computation` has kept.

  Where it need not search for dead code, its result is the jaxpr that it got;
  since JAX 0.11 that is also what its cache refers to weakly, so that neither
  would be freed.
  """
  if not has_closed_jaxprs:
    pxla._dce_jaxpr.evict_weakref(jaxpr)


def computation_platforms(computation) -> tuple[str, ...]:
  """The platforms that JAX has found for a `pxla.MeshComputation`.

  It has them since JAX 0.4.29:
  https://github.com/jax-ml/jax/commit/bb4c073574.
  """
  if hasattr(computation, "_platforms"):
    return tuple(computation._platforms)
  return (_client_platform(computation.compile_args["backend"]),)


def lowering_platform(arguments: dict[str, Any], jaxpr: core.Jaxpr) -> str:
  """The platform that `pxla.lower_sharding_computation` lowers for by itself.

  Args:
    arguments: its arguments, by name.
    jaxpr: the computation.

  Returns:
    The name of the platform.
  """
  # https://github.com/jax-ml/jax/commit/958234a9c1 (0.4.33) passes a mesh.
  devices = arguments.get("devices_from_context")
  context_mesh = arguments.get("context_mesh")
  if context_mesh is not None and not context_mesh.empty:
    devices = getattr(context_mesh, "_flat_devices_tuple", None)
  if devices:
    return _platform_of(devices[0])
  shardings = [*arguments["in_shardings"], *arguments["out_shardings"]]
  # With one platform there is nothing to find out, and this takes time.
  if len(xla_bridge.backends()) > 1:
    shardings.extend(_intermediate_shardings(jaxpr))
  for sharding in shardings:
    if devices := _devices_of(sharding):
      return _platform_of(devices[0])
  return default_platform()


def running_platform(values: Sequence, params: dict[str, Any]) -> str | None:
  """The platform on which JAX is about to run an equation.

  Args:
    values: the inputs of the equation that are known.
    params: its params.

  Returns:
    The name of the platform; None if the equation is traced, or if it is not
    sure where it runs.
  """
  if not (_runs_now() and all(map(is_concrete, values))):
    return None
  # With one platform there is nothing to find out, and this takes time.
  if len(xla_bridge.backends()) == 1:
    return default_platform()
  devices = {d for x in values if getattr(x, "_committed", False)
             for d in x.devices()}
  places = jax.tree_util.tree_leaves(params)
  for jaxpr in jaxprs_in_params(params):
    places.extend(_intermediate_shardings(open_jaxpr(jaxpr)))
  for place in places:
    devices.update(_devices_of(place))
  platforms = {_platform_of(device) for device in devices}
  if not platforms:
    return default_platform()
  return platforms.pop() if len(platforms) == 1 else None


def _runs_now() -> bool:
  """Whether what is bound is run, and not traced.

  There are no traces below others since JAX 0.4.36:
  https://github.com/jax-ml/jax/commit/c36e1f7c1a.
  """
  if hasattr(core, "trace_ctx"):
    return isinstance(core.trace_ctx.trace, core.EvalTrace)
  stack = core.thread_local_state.trace_state.trace_stack
  return stack.dynamic.level == 0


@weakref_lru_cache
def _intermediate_shardings(jaxpr: core.Jaxpr) -> tuple:
  # https://github.com/jax-ml/jax/commit/0426388d31 (0.4.31) renamed it.
  find = (getattr(dispatch, "get_intermediate_shardings", None) or
          dispatch.jaxpr_shardings)
  return tuple(sharding for sharding, _ in find(jaxpr))


def _devices_of(place) -> Sequence:
  """The devices of a sharding or a mesh; none of anything else."""
  if isinstance(place, jax.sharding.Sharding):
    try:
      return place._device_assignment
    except ValueError:  # an abstract mesh has no devices
      return ()
  if isinstance(place, jax.sharding.Mesh) and not place.empty:
    return tuple(place.devices.flat)
  return ()


def default_platform() -> str:
  """The platform that JAX runs on if it is not told another."""
  device = jax.config.jax_default_device
  if device is not None and not isinstance(device, str):
    return _platform_of(device)
  return _client_platform(xla_bridge.get_backend(device))


def _platform_of(device) -> str:
  return _client_platform(device.client)


def _client_platform(client) -> str:
  return getattr(client, "_raw_platform", client.platform)


def ordered_effects(effects) -> list:
  return list(effects_lib.ordered_effects.filter_in(effects))


def flat_ir_types(module_context, avals: Sequence) -> tuple[list, Callable]:
  """The IR types of some avals in one list, and what undoes it for values.

  The helpers for this moved at JAX 0.4.31, 0.10.0, 0.10.1 and 0.10.2, and until
  the first of these the value of an output is a list of IR values:
  https://github.com/jax-ml/jax/commit/3d5784a343,
  https://github.com/jax-ml/jax/commit/99a8f4b908,
  https://github.com/jax-ml/jax/commit/eb56e59769,
  https://github.com/jax-ml/jax/commit/b8105546a9.
  """
  if hasattr(mlir, "_aval_to_ir_types"):
    context = (module_context,) if takes(mlir._aval_to_ir_types, "ctx") else ()
    types_ = [mlir._aval_to_ir_types(*context, a) for a in avals]
  elif values_are_lists:
    types_ = [mlir.aval_to_ir_types(a) for a in avals]
    return (util.flatten(types_),
            lambda values: util.unflatten(values, list(map(len, types_))))
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
  if values_are_lists:
    return util.flatten(values)
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


# https://github.com/jax-ml/jax/commit/3d5784a343 (JAX 0.4.31): up to then
# `mlir.jaxpr_subcomp` takes and returns a list of IR values for each value.
values_are_lists = hasattr(mlir, "wrap_singleton_ir_values")


def visible_dim_var_values(values: Sequence[ir.Value]) -> Sequence[ir.Value]:
  """The dimension variables, and the platform index, in the present block.

  Up to JAX 0.7.0 what is in a `shard_map` is given those of the block around,
  which it can't see if Shardy partitions the program:
  https://github.com/jax-ml/jax/commit/dbd853e67a.
  """
  if not values:  # as for one platform
    return values
  block = ir.InsertionPoint.current.block
  region = block.owner.operation
  if (region.name != "sdy.manual_computation" or
      list(region.operands[:len(values)]) != list(values)):
    return values
  return list(block.arguments[:len(values)])


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
  positional: tuple = ()
  kwargs: dict[str, Any] = dict(dim_var_values=ctx.dim_var_values)
  # The name stack was in the module context up to 0.4.24,
  # https://github.com/jax-ml/jax/commit/f1ea67117e.
  if hasattr(ctx, "name_stack"):
    positional = (ctx.name_stack,)
  if values_are_lists:
    args = tuple(map(mlir.wrap_singleton_ir_values, args))
  # https://github.com/jax-ml/jax/commit/017509aec2 (0.7.1) and
  # https://github.com/jax-ml/jax/commit/6f2f0f362d (0.9.1)
  if hasattr(ctx, "const_lowering"):
    kwargs["const_lowering"] = ctx.const_lowering
  if _takes_outer_traceback:
    kwargs["outer_traceback"] = ctx.traceback
  return mlir.jaxpr_subcomp(
      ctx.module_context, open_jaxpr(jaxpr), *positional, tokens_in,
      _ir_consts(jaxpr), *args, **kwargs)


_takes_outer_traceback = takes(mlir.jaxpr_subcomp, "outer_traceback")


def i32_constant(i: int) -> ir.Value:
  return mlir.ir_constant(np.int32(i))


def convert_integer(value: ir.Value, type_: ir.Type) -> ir.Value:
  return value if value.type == type_ else hlo.convert(type_, value)


def i32_type() -> ir.Type:
  return ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
