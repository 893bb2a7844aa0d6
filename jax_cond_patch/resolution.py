"""Resolves the platform conditionals of a jaxpr for its lowering platforms.

Once the lowering platforms are known, so is the owner of each: the branch that
runs there. A platform conditional with one owner becomes the equations of that
branch, as if the user had called it; one with several keeps the branches that
are reached, each resolved for the platforms that it owns. Nothing of the other
branches is left: no equation, constant, effect or input.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import enum
import operator
from typing import Any

from jax._src import core
from jax._src.interpreters import partial_eval as pe
import numpy as np

from jax_cond_patch import deferral
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals

# Primitives that lower their jaxprs as if these stood in the jaxpr around them.
# A primitive that is not here may lower its own for another platform, as
# `pallas_call` does; what it lowers by `mlir.jaxpr_subcomp` is resolved there.
TRANSPARENT_PRIMITIVES = frozenset([
    "call", "checkpoint", "closed_call", "cond", "core_call",
    "core_closed_call", "custom_jvp_call", "custom_lin", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "eval_jaxpr", "jit", "named_call", "pjit", "remat",
    "remat2", "remat_call", "run_state", "scan", "shard_map", "while",
    "xla_call", "xla_pmap"])


class Scope(enum.Enum):
  """How deep `resolve` goes.

  Attributes:
    PROGRAM: into the jaxprs of transparent primitives, before lowering.
    EQUATIONS: the equations of one jaxpr, when they are about to be lowered;
      several owners become a `platform_case`.
  """
  PROGRAM = "program"
  EQUATIONS = "equations"


# What a platform conditional with several owners is, once nothing but lowering
# is left to do: a conditional on the platform index of the module.
platform_case_p = core.Primitive("platform_case")
platform_case_p.multiple_results = True


@platform_case_p.def_effectful_abstract_eval
def _platform_case_abstract_eval(*_, branches, platforms):
  del platforms
  return (branches[0].out_avals,
          core.join_effects(*(branch.effects for branch in branches)))


def is_platform_conditional(eqn: core.JaxprEqn) -> bool:
  return (eqn.primitive is internals.cond_p and
          eqn.params.get(internals.PLATFORMS) is not None)


@internals.weakref_lru_cache
def has_platform_conditionals(jaxpr: core.Jaxpr) -> bool:
  """Whether something in a jaxpr, or in its equations' jaxprs, is resolved."""
  return any(
      eqn.primitive is internals.platform_index_p or
      is_platform_conditional(eqn) or
      any(map(has_platform_conditionals, core.jaxprs_in_params(eqn.params)))
      for eqn in jaxpr.eqns)


def resolve(jaxpr, platforms: Sequence[str], scope: Scope):
  """Resolves the platform conditionals of a jaxpr.

  Args:
    jaxpr: a `Jaxpr` or `ClosedJaxpr`.
    platforms: the lowering platforms; a module's platform index counts these.
    scope: how deep to go.

  Returns:
    A jaxpr with the same inputs, outputs and constants, without dead equations;
    the same object if there was nothing to resolve.
  """
  if not has_platform_conditionals(internals.open_jaxpr(jaxpr)):
    return jaxpr
  resolved = _resolve(jaxpr, tuple(platforms), scope)
  return jaxpr if resolved is None else internals.map_jaxpr(_dce, resolved)


def _dce(jaxpr: core.Jaxpr) -> core.Jaxpr:
  if jaxpr.constvars and not hasattr(jaxpr, "consts"):
    # JAX's rules for dead code know no constants up to 0.10.
    lifted = pe.convert_constvars_jaxpr(jaxpr)
    lifted, _ = pe.dce_jaxpr(lifted, [True] * len(lifted.outvars), True)
    return pe.convert_invars_to_constvars(lifted, len(jaxpr.constvars))
  return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]


@internals.weakref_lru_cache
def _resolve(jaxpr, platforms: tuple[str, ...], scope: Scope):
  """As `resolve`, with dead equations; None if nothing changes.

  The same jaxpr gives the same object, so that what shares a jaxpr shares its
  lowering afterwards. None, since the cache must not hold on to its own key.
  """
  if not has_platform_conditionals(internals.open_jaxpr(jaxpr)):
    return None
  resolver = _Resolver(platforms, scope)
  resolved = internals.map_jaxpr(resolver.jaxpr, jaxpr)
  return resolved if resolver.changed else None


class _Resolver:
  """Rewrites one jaxpr, and the branches that are inlined into it."""

  def __init__(self, platforms: tuple[str, ...], scope: Scope):
    self.platforms = platforms
    self.scope = scope
    self.eqns: list[core.JaxprEqn] = []
    self.new_var = core.gensym()
    self.changed = False

  def jaxpr(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
    outvars = self.inline(jaxpr, {}, None)
    made = {e for eqn in self.eqns for e in eqn.effects}
    effects = {e for e in jaxpr.effects
               if internals.is_input_effect(e) or e in made}
    return jaxpr.replace(eqns=self.eqns, outvars=outvars, effects=effects,
                         debug_info=jaxpr.debug_info)

  def inline(self, jaxpr: core.Jaxpr, env: dict[core.Var, core.Atom],
             caller: core.JaxprEqn | None) -> list[core.Atom]:
    """Emits the equations of a jaxpr.

    Args:
      jaxpr: the jaxpr.
      env: what its variables are here. Those of a branch are made anew, since
        a branch may be inlined twice.
      caller: the platform conditional that it is a branch of, if it is one.

    Returns:
      What its outputs are here.
    """
    def read(atom):
      return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    for eqn in jaxpr.eqns:
      here = self.renamed(eqn, read, caller)
      outs = self.eqn(here)
      env.update((v, outs.get(w, w)) for v, w in zip(eqn.outvars, here.outvars)
                 if v is not w or w in outs)
    return [read(x) for x in jaxpr.outvars]

  def renamed(self, eqn: core.JaxprEqn, read: Callable,
              caller: core.JaxprEqn | None) -> core.JaxprEqn:
    """Returns an equation with its variables, place and context here."""
    invars = [read(x) for x in eqn.invars]
    effects = internals.rename_input_effects(eqn.effects, read)
    if caller is None:
      if effects is eqn.effects and all(map(operator.is_, invars, eqn.invars)):
        return eqn
      return eqn.replace(invars=invars, effects=effects)
    outvars = [v if isinstance(v, core.DropVar) else self.new_var(v.aval)
               for v in eqn.outvars]
    name_stack = caller.source_info.name_stack + eqn.source_info.name_stack
    changes: dict[str, Any] = dict(
        invars=invars, outvars=outvars, effects=effects,
        source_info=eqn.source_info.replace(name_stack=name_stack))
    if internals.compute_type(caller) and not internals.compute_type(eqn):
      changes["ctx"] = caller.ctx
    return eqn.replace(**changes)

  def eqn(self, eqn: core.JaxprEqn) -> dict[core.Var, core.Atom]:
    """Emits one equation, and returns which of its outputs are other atoms."""
    if eqn.primitive is internals.platform_index_p:
      return self.platform_index(eqn)
    if is_platform_conditional(eqn):
      return self.platform_conditional(eqn)
    if (self.scope is Scope.PROGRAM and
        eqn.primitive.name in TRANSPARENT_PRIMITIVES):
      mapped = _map_jaxprs(
          eqn, lambda j: _resolve(j, self.platforms_of(eqn), self.scope))
      self.changed = self.changed or mapped is not eqn
      eqn = mapped
    self.eqns.append(eqn)
    return {}

  def platforms_of(self, eqn: core.JaxprEqn) -> tuple[str, ...]:
    return (internals.platforms_for_eqn_ctx(getattr(eqn, "ctx", None)) or
            self.platforms)

  def platform_index(self, eqn: core.JaxprEqn) -> dict[core.Var, core.Atom]:
    branches_platforms = internals.indexed_platforms(eqn.params)
    reachable = platforms_lib.reachable(
        branches_platforms, self.platforms_of(eqn))
    if reachable.missing:
      self.missing(eqn, branches_platforms, reachable.missing)
      return {}
    if len(reachable.branches) > 1:
      self.eqns.append(eqn)
      return {}
    self.changed = True
    index = core.Literal(np.int32(reachable.branches[0]), eqn.outvars[0].aval)
    return {eqn.outvars[0]: index}

  def platform_conditional(self, eqn: core.JaxprEqn
                           ) -> dict[core.Var, core.Atom]:
    self.changed = True
    branches_platforms = eqn.params[internals.PLATFORMS]
    reachable = platforms_lib.reachable(
        branches_platforms, self.platforms_of(eqn))
    if reachable.missing:
      self.missing(eqn, branches_platforms, reachable.missing)
      return {}
    branches = [eqn.params["branches"][i] for i in reachable.branches]
    if len(branches) == 1:
      return self.owner(eqn, branches[0])
    if self.scope is Scope.PROGRAM:
      self.several_owners(eqn, branches, reachable.owned)
    else:
      self.eqns.append(eqn.replace(
          invars=eqn.invars[1:], primitive=platform_case_p,
          params=dict(branches=tuple(branches), platforms=reachable.owned),
          effects=_kept_effects(eqn.effects, eqn.params["branches"], branches)))
    return {}

  def owner(self, eqn: core.JaxprEqn, branch) -> dict[core.Var, core.Atom]:
    jaxpr = internals.open_jaxpr(branch)
    env = dict(zip(jaxpr.invars, eqn.invars[1:]))
    env.update((v, core.Literal(c, v.aval))
               for v, c in zip(jaxpr.constvars, branch.consts))
    return dict(zip(eqn.outvars, self.inline(jaxpr, env, eqn)))

  def several_owners(self, eqn: core.JaxprEqn, branches: Sequence,
                     owned: tuple[tuple[str, ...], ...]) -> None:
    index = self.new_var(eqn.invars[0].aval)
    self.eqns.append(eqn.replace(
        invars=[], outvars=[index], primitive=internals.platform_index_p,
        params=internals.platform_index_params(owned), effects=set()))
    kept = tuple(
        branch if (new := _resolve(branch, names, self.scope)) is None else new
        for branch, names in zip(branches, owned))
    params = {**eqn.params, "branches": kept, internals.PLATFORMS: owned}
    self.eqns.append(eqn.replace(
        invars=[index, *eqn.invars[1:]], params=params,
        effects=_kept_effects(eqn.effects, eqn.params["branches"], kept)))

  def missing(self, eqn: core.JaxprEqn, branches_platforms,
              missing: Sequence[str]) -> None:
    self.changed = True
    names = ", ".join(map(repr, missing))
    message = (
        f"platform_dependent has no branch for {names}, for which this program "
        "is lowered; it has branches for "
        f"{platforms_lib.describe(branches_platforms)}. It is called at "
        f"{internals.user_location(eqn.source_info)}. Add a branch "
        f"`{missing[0]}=` or `default=`. See docs/pages/errors.md#no-branch.")
    self.eqns.append(deferral.deferred_error_eqn(
        eqn, deferral.DeferredError(NotImplementedError, message)))


def _map_jaxprs(eqn: core.JaxprEqn, fun) -> core.JaxprEqn:
  """Replaces the jaxprs of an equation for which `fun` returns another one."""
  old, new = [], []

  def mapped(param):
    if isinstance(param, (tuple, list)):
      values = [mapped(x) for x in param]
      if all(a is b for a, b in zip(values, param)):
        return param
      make = getattr(type(param), "_make", type(param))
      return make(values)
    if not internals.is_jaxpr(param):
      return param
    result = fun(param)
    old.append(param)
    new.append(param if result is None else result)
    return new[-1]

  params = {name: mapped(param) for name, param in eqn.params.items()}
  if all(a is b for a, b in zip(old, new)):
    return eqn
  return eqn.replace(params=params,
                     effects=_kept_effects(eqn.effects, old, new))


def _kept_effects(effects, old: Sequence, new: Sequence):
  """The effects of an equation once its jaxprs have changed."""
  dropped = {e for jaxpr in old for e in jaxpr.effects}
  dropped -= {e for jaxpr in new for e in jaxpr.effects}
  return {e for e in effects
          if internals.is_input_effect(e) or e not in dropped}
