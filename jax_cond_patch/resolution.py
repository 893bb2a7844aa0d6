"""Resolves the platform conditionals of a jaxpr for its lowering platforms.

Once the lowering platforms are known, so is the owner of each: the branch that
runs there. A platform conditional with one owner becomes the equations of that
branch, as if the user had called it; one with several keeps the branches that
are reached, each resolved for the platforms that it owns. Nothing of the other
branches is left: no equation, constant, effect or input.

An ordinary conditional whose index is known by then, as far as `constants`
follows it, becomes the branch that it takes. One whose index differs by
platform is a platform conditional.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
import enum
import functools
import itertools
import operator
from typing import Any

from jax._src import core
from jax._src import sharding_impls
from jax._src.interpreters import partial_eval as pe
import numpy as np

from jax_cond_patch import constants
from jax_cond_patch import deferral
from jax_cond_patch import pinning
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals

Platform = platforms_lib.Platform

# Primitives that lower their jaxprs as if these stood in the jaxpr around them.
# A primitive that is not here may lower its own for another platform, as
# `pallas_call` does; what it lowers by `mlir.jaxpr_subcomp` is resolved there.
TRANSPARENT_PRIMITIVES = constants.CALLS | {
    "cond", "custom_lin", "run_state", "scan", "while", "xla_pmap"}


class Scope(enum.Enum):
  """How deep `resolve` goes.

  Attributes:
    PROGRAM: into the jaxprs of transparent primitives, before lowering.
    EQUATIONS: the equations of one jaxpr, when they are about to be lowered;
      several owners become a `platform_case`. Kernels are resolved, too.
    KERNEL: all of a kernel. What it runs on does not change within, and nothing
      dies but what other branches needed: its primitives say little about their
      effects.
  """
  PROGRAM = "program"
  EQUATIONS = "equations"
  KERNEL = "kernel"

  # Faster than by name. A scope is in the key of each jaxpr that is looked at.
  __hash__ = object.__hash__


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


_RESOLVED = frozenset([
    internals.cond_p.name, internals.platform_index_p.name,
    pinning.pinned_p.name, pinning.CALL_EXPORTED])

_RESOLVED_WHEN_LOWERED = internals.KERNELS | _RESOLVED

# The names of the primitives whose equations `resolve` looks at; None for all.
_LOOKED_AT: dict[Scope, frozenset[str] | None] = {
    Scope.PROGRAM: TRANSPARENT_PRIMITIVES | _RESOLVED,
    Scope.EQUATIONS: _RESOLVED_WHEN_LOWERED,
    Scope.KERNEL: None}


@internals.weakref_lru_cache_of_all_contexts
def is_resolvable(jaxpr, scope: Scope) -> bool:
  """Whether `resolve` may have something to do."""
  names = _LOOKED_AT[scope]
  inner_scope = Scope.PROGRAM if scope is Scope.PROGRAM else Scope.KERNEL
  values: constants.Values | None = None
  for eqn in internals.open_jaxpr(jaxpr).eqns:
    if names is not None and eqn.primitive.name not in names:
      continue
    if (eqn.primitive in (internals.platform_index_p, pinning.pinned_p) or
        is_platform_conditional(eqn) or pinning.is_pinned_export(eqn)):
      return True
    jaxprs = internals.jaxprs_in_params(eqn.params) + internals.index_maps(eqn)
    if not jaxprs:
      continue
    values = values or constants.Values.of_jaxpr(jaxpr, None, lambda i: None)
    if eqn.primitive is internals.cond_p and (
        len(jaxprs) == 1 or values(eqn.invars[0]) is not None):
      return True
    if scope is Scope.EQUATIONS and not internals.is_kernel(eqn):
      continue
    if any(is_resolvable(jaxpr, inner_scope) for jaxpr in jaxprs):
      return True
    if all(values(x) is None for x in eqn.invars):
      continue
    for called, operands in constants.operands(eqn):
      known = {i for i, x in enumerate(operands) if values(x) is not None}
      if known and not known.isdisjoint(_index_inputs(called)):
        return True
  return False


@internals.weakref_lru_cache_of_all_contexts
def _index_inputs(jaxpr) -> frozenset[int]:
  """The inputs on which the index of a conditional may depend, by position."""
  inputs: set[int] = set()
  values = constants.Values.of_jaxpr(jaxpr, None, inputs.add)
  for eqn in internals.open_jaxpr(jaxpr).eqns:
    if eqn.primitive is internals.cond_p and not is_platform_conditional(eqn):
      values(eqn.invars[0])
    for called, operands in constants.operands(eqn):
      for i in _index_inputs(called):
        values(operands[i])
  return frozenset(inputs)


def resolve(jaxpr, platforms: Sequence[Platform], scope: Scope,
            drop_dead: bool = True):
  """Resolves the platform conditionals of a jaxpr.

  Args:
    jaxpr: a `Jaxpr` or `ClosedJaxpr`.
    platforms: the lowering platforms; a module's platform index counts these.
    scope: how deep to go.
    drop_dead: whether to drop equations that are dead; those of a kernel stay.

  Returns:
    A jaxpr with the same inputs, outputs and constants; the same object if
    there was nothing to resolve.
  """
  if scope is Scope.EQUATIONS and _RESOLVED_WHEN_LOWERED.isdisjoint(
      [eqn.primitive.name for eqn in internals.open_jaxpr(jaxpr).eqns]):
    return jaxpr  # So most end: this takes less time than a cache.
  if not is_resolvable(jaxpr, scope):
    return jaxpr
  resolved = _resolve(jaxpr, tuple(platforms), scope)
  if resolved is None or scope is Scope.KERNEL or not drop_dead:
    return resolved or jaxpr
  return internals.map_jaxpr(_dce, resolved)


def _dce(jaxpr: core.Jaxpr) -> core.Jaxpr:
  if is_all_alive(jaxpr):
    return jaxpr
  if jaxpr.constvars and not hasattr(jaxpr, "consts"):
    # JAX's rules for dead code know no constants up to 0.10.
    lifted = pe.convert_constvars_jaxpr(jaxpr)
    lifted, _ = pe.dce_jaxpr(lifted, [True] * len(lifted.outvars), True)
    return pe.convert_invars_to_constvars(lifted, len(jaxpr.constvars))
  return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]


@internals.weakref_lru_cache_of_all_contexts
def is_all_alive(jaxpr) -> bool:
  """Whether all in a jaxpr is used, so that there is no need to look further.

  False does not mean that something is dead. JAX's own search takes longer.
  """
  jaxpr = internals.open_jaxpr(jaxpr)
  used = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
  for eqn in reversed(jaxpr.eqns):
    if used.isdisjoint(eqn.outvars):
      return False
    if eqn.primitive in pe.dce_rules and not (
        used.issuperset(eqn.outvars) and
        all(map(is_all_alive, internals.jaxprs_in_params(eqn.params)))):
      return False
    for x in eqn.invars:
      if isinstance(x, core.Var):
        used.add(x)
  return used.issuperset(jaxpr.invars) and used.issuperset(jaxpr.constvars)


# The position of an input, and its value on each lowering platform.
Known = tuple[int, tuple[constants.Value, ...]]


@internals.weakref_lru_cache
def _resolve(jaxpr, platforms: tuple[Platform, ...], scope: Scope,
             known: tuple[Known, ...] = ()):
  """As `resolve`, with dead equations; None if nothing changes.

  The same jaxpr gives the same object, so that what shares a jaxpr shares its
  lowering afterwards. None, since the cache must not hold on to its own key.
  """
  if not known and not is_resolvable(jaxpr, scope):
    return None
  resolver = _Resolver(jaxpr, platforms, scope, dict(known))
  resolved = internals.map_jaxpr(resolver.jaxpr, jaxpr)
  return resolved if resolver.changed else None


class _Emitted(list):
  """The equations of a jaxpr that is being made."""

  def __init__(self):
    super().__init__()
    self._definitions: dict[core.Var, core.JaxprEqn] = {}
    self._num_defined = 0

  def definition_of(self, var: core.Var) -> core.JaxprEqn | None:
    """The equation that defines a variable here; few programs ask for one."""
    for eqn in self[self._num_defined:]:
      self._definitions.update(dict.fromkeys(eqn.outvars, eqn))
    self._num_defined = len(self)
    return self._definitions.get(var)


class _Resolver:
  """Rewrites one jaxpr, and the branches that are inlined into it."""

  def __init__(self, jaxpr, platforms: tuple[Platform, ...], scope: Scope,
               known: dict[int, tuple[constants.Value, ...]]):
    self.platforms = platforms
    self.scope = scope
    self.looked_at = _LOOKED_AT[scope]
    self.eqns = _Emitted()
    self.new_var = core.gensym()
    opened = internals.open_jaxpr(jaxpr)
    self.used: set[core.Var] = {
        *opened.constvars, *opened.invars,
        *itertools.chain(*(eqn.outvars for eqn in opened.eqns))}
    unknown = (None,) * len(platforms)
    def given(n: int):
      return lambda i: known.get(i, unknown)[n]
    self.values = {
        platform: constants.Values.of_jaxpr(
            jaxpr, platform, given(n), self.eqns.definition_of)
        for n, platform in enumerate(platforms)}
    self.changed = False

  def jaxpr(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
    outvars = self.inline(jaxpr, {})
    eqns = (_without_newly_dead(self.eqns, outvars, jaxpr)
            if self.scope is Scope.KERNEL else list(self.eqns))
    return deferral.with_own_effects(jaxpr.replace(
        eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info))

  def inline(self, jaxpr: core.Jaxpr, env: dict[core.Var, core.Atom],
             caller: core.JaxprEqn | None = None) -> list[core.Atom]:
    """Emits the equations of a jaxpr.

    Args:
      jaxpr: the jaxpr.
      env: what its variables are here, where they are not themselves.
      caller: the platform conditional that it is a branch of, if it is one.

    Returns:
      What its outputs are here.
    """
    renamed = (_renaming(env) if caller is None else
               _renaming_in(caller, env, self.used, self.new_var))
    looked_at = self.looked_at
    for eqn in jaxpr.eqns:
      here = renamed(eqn)
      if looked_at is not None and eqn.primitive.name not in looked_at:
        self.eqns.append(here)
      elif outs := self.eqn(here):
        for v, w in zip(eqn.outvars, here.outvars):
          if w in outs:
            env[v] = outs[w]
    return _read(env, jaxpr.outvars)

  def eqn(self, eqn: core.JaxprEqn) -> dict[core.Var, core.Atom]:
    """Emits one equation, and returns which of its outputs are other atoms."""
    if eqn.primitive is internals.platform_index_p:
      return self.platform_index(eqn)
    if eqn.primitive is pinning.pinned_p:
      pinning.check(eqn.params["platforms"], self.platforms_of(eqn),
                    eqn.source_info)
      self.changed = True
      return {}
    if pinning.is_pinned_export(eqn):
      pinning.check_export(eqn, self.platforms_of(eqn))
    if eqn.primitive is internals.cond_p:
      if is_platform_conditional(eqn):
        return self.platform_conditional(eqn)
      if (self.scope is not Scope.KERNEL and
          (taken := self.taken(eqn)) is not None):
        return self.constant_conditional(eqn, taken)
    if self.scope is Scope.EQUATIONS and internals.is_kernel(eqn):
      eqn = self.kernel(eqn)
    elif self.scope is Scope.KERNEL or (
        self.scope is Scope.PROGRAM and
        eqn.primitive.name in TRANSPARENT_PRIMITIVES):
      platforms = self.platforms_of(eqn)
      operands = {id(j): xs for j, xs in constants.operands(eqn)}
      mapped = map_jaxprs(eqn, lambda j: _resolve(
          j, platforms, self.scope,
          self.known(eqn, j, operands.get(id(j)), platforms)))
      if mapped is not eqn:
        self.changed = True
        self.eqns.append(mapped)
        return _forwarded(mapped)
    self.eqns.append(eqn)
    return {}

  def known(self, eqn: core.JaxprEqn, jaxpr, operands: Sequence | None,
            platforms: tuple[Platform, ...]) -> tuple[Known, ...]:
    """What is known of the inputs of a jaxpr on which its conditionals depend.

    Args:
      eqn: the equation that the jaxpr is of.
      jaxpr: the jaxpr.
      operands: what its inputs are outside, None if that is not followed.
      platforms: the lowering platforms of the jaxpr.

    Returns:
      What is known, by position.
    """
    if operands is None or self.scope is Scope.KERNEL:
      return ()
    by_position = []
    for i, operand in enumerate(operands):
      values = {p: value(operand) for p, value in self.values.items()}
      if internals.platforms_for_eqn_ctx(getattr(eqn, "ctx", None)):
        # It runs on another platform, for each of these.
        first, *others = values.values()
        uniform = first if all(v == first for v in others) else None
        values = dict.fromkeys(platforms, uniform)
      if (any(v is not None for v in values.values()) and
          i in _index_inputs(jaxpr)):
        by_position.append((i, tuple(values[p] for p in platforms)))
    return tuple(by_position)

  def taken(self, eqn: core.JaxprEqn) -> tuple[int | None, ...] | None:
    """The branch that a conditional takes on each platform, where it is known.

    Args:
      eqn: the conditional.

    Returns:
      A tuple with None for the platforms where it is not known; None if the
      conditional is to be left as it is.
    """
    branches = eqn.params["branches"]
    if len(branches) == 1:
      return (0,) * len(self.platforms)
    indices = [value(eqn.invars[0]) for value in self.values.values()]
    taken = tuple(None if index is None else constants.taken(branches, index)
                  for index in indices)
    if set(taken) == {None}:
      return None
    if len(set(taken)) > 1 and self.platforms_of(eqn) != self.platforms:
      return None  # It runs on another platform, for each of these.
    if None in taken and any(map(internals.is_input_effect, eqn.effects)):
      return None  # They would be about other inputs.
    return taken

  def platforms_of(self, eqn: core.JaxprEqn) -> tuple[Platform, ...]:
    if self.scope is Scope.KERNEL:
      return self.platforms
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
    index, = eqn.outvars
    return {index: _index_literal(reachable.branches[0], index.aval)}

  def platform_conditional(self, eqn: core.JaxprEqn
                           ) -> dict[core.Var, core.Atom]:
    self.changed = True
    branches_platforms = eqn.params[internals.PLATFORMS]
    reachable = platforms_lib.reachable(
        branches_platforms, self.platforms_of(eqn))
    if reachable.missing:
      self.missing(eqn, branches_platforms, reachable.missing)
      return {}
    if len(reachable.branches) == 1:
      return self.owner(eqn, eqn.params["branches"][reachable.branches[0]])
    branches = [eqn.params["branches"][i] for i in reachable.branches]
    if self.scope is Scope.PROGRAM:
      self.several_owners(eqn, branches, reachable.owned)
    else:
      self.eqns.append(eqn.replace(
          invars=eqn.invars[1:], primitive=platform_case_p,
          params=dict(branches=tuple(branches), platforms=reachable.owned),
          effects=changed_effects(
              eqn.effects, eqn.params["branches"], branches)))
    return {}

  def constant_conditional(self, eqn: core.JaxprEqn,
                           taken: tuple[int | None, ...]
                           ) -> dict[core.Var, core.Atom]:
    """Takes the branches of an ordinary conditional.

    Args:
      eqn: the conditional.
      taken: the branch that it takes, for each of the lowering platforms; None
        where that is not known.

    Returns:
      As `eqn`.
    """
    if len(set(taken)) == 1:
      assert taken[0] is not None
      self.changed = True
      return self.owner(eqn, eqn.params["branches"][taken[0]])
    branches = list(eqn.params["branches"])
    choices: list[int | None] = list(range(len(branches)))
    if None in taken:
      # There it is a conditional still, as one more branch, whose first input
      # is the index.
      choices.append(None)
      alone = [eqn.replace(params={**eqn.params, "branches": (branch,)})
               for branch in branches]
      branches = [internals.jaxpr_of(e, like=internals.open_jaxpr(branches[0]))
                  for e in (*alone, eqn)]
      eqn = eqn.replace(invars=[eqn.invars[0], *eqn.invars],
                        params=internals.params_with_operand(eqn.params))
    platforms = tuple(
        tuple(p for p, i in zip(self.platforms, taken) if i == choice)
        for choice in choices)
    return self.platform_conditional(eqn.replace(params={
        **eqn.params, "branches": tuple(branches),
        internals.PLATFORMS: platforms}))

  def owner(self, eqn: core.JaxprEqn, branch) -> dict[core.Var, core.Atom]:
    jaxpr = internals.open_jaxpr(branch)
    env = dict(zip(jaxpr.invars, eqn.invars[1:]))
    for v, c in zip(jaxpr.constvars, branch.consts):
      env[v] = core.Literal(c, v.aval)
    # What computes its outputs defines those of the conditional, so that what
    # reads these stays as it is.
    for x, v in zip(jaxpr.outvars, eqn.outvars):
      if (isinstance(x, core.Var) and not isinstance(v, core.DropVar) and
          (x.aval is v.aval or x.aval == v.aval)):
        env.setdefault(x, v)
    outs = self.inline(jaxpr, env, eqn)
    return {v: out for v, out in zip(eqn.outvars, outs) if v is not out}

  def several_owners(self, eqn: core.JaxprEqn, branches: Sequence,
                     owned: tuple[tuple[str, ...], ...]) -> None:
    index = self.new_var(eqn.invars[0].aval)
    self.eqns.append(eqn.replace(
        invars=[], outvars=[index], primitive=internals.platform_index_p,
        params=internals.platform_index_params(owned), effects=set()))
    kept = tuple(
        deferral.with_own_effects(branch if new is None else new)
        for branch, new in zip(branches, (
            _resolve(branch, names, self.scope,
                     self.known(eqn, branch, eqn.invars[1:], names))
            for branch, names in zip(branches, owned))))
    params = {**eqn.params, "branches": kept, internals.PLATFORMS: owned}
    self.eqns.append(eqn.replace(
        invars=[index, *eqn.invars[1:]], params=params,
        effects=changed_effects(eqn.effects, eqn.params["branches"], kept)))

  def kernel(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Resolves a kernel for each of the platforms that it is lowered for."""
    chosen: dict[Hashable, list[str]] = {}
    for platform in self.platforms_of(eqn):
      assert isinstance(platform, str)  # those of a module
      chosen.setdefault(_choices(eqn, platform), []).append(platform)
    kernels = [_resolve_kernel(eqn, names[0]) for names in chosen.values()]
    self.changed = self.changed or kernels != [eqn]
    if len(kernels) == 1:
      return kernels[0]
    body = next(core.jaxprs_in_params(eqn.params))
    return eqn.replace(primitive=platform_case_p, params=dict(
        branches=tuple(internals.jaxpr_of(kernel, like=body)
                       for kernel in kernels),
        platforms=tuple(map(tuple, chosen.values()))))

  def missing(self, eqn: core.JaxprEqn, branches_platforms,
              missing: Sequence[str]) -> None:
    self.changed = True
    message = no_branch(branches_platforms, missing, eqn.source_info)
    self.eqns.append(deferral.deferred_error_eqn(
        eqn, deferral.DeferredError(NotImplementedError, message)))


@functools.lru_cache
def _index_literal(branch: int, aval: core.ShapedArray) -> core.Literal:
  return core.Literal(np.int32(branch), aval)


def _read(env: dict[core.Var, core.Atom], atoms: Sequence[core.Atom]
          ) -> list[core.Atom]:
  # A literal may not be hashable.
  return [x if isinstance(x, core.Literal) else env.get(x, x) for x in atoms]


def _renaming(env: dict[core.Var, core.Atom]) -> Callable:
  """Makes what gives an equation the variables that it has here."""
  def renamed(eqn):
    if not env or not eqn.invars:
      return eqn
    invars = _read(env, eqn.invars)
    if is_platform_conditional(eqn):
      invars[0] = eqn.invars[0]  # Nothing reads it: it gets another index.
    effects = eqn.effects and internals.rename_input_effects(eqn.effects, env)
    if effects is eqn.effects and all(map(operator.is_, invars, eqn.invars)):
      return eqn
    return eqn.replace(invars=invars, effects=effects)

  return renamed


def _renaming_in(caller: core.JaxprEqn, env: dict[core.Var, core.Atom],
                 used: set[core.Var], new_var: Callable) -> Callable:
  """As `_renaming`, of a branch of a conditional: also its place and context.

  A branch may be inlined twice, and share variables with other jaxprs: what is
  in `used` already gets another variable.
  """
  name_stack = caller.source_info.name_stack
  is_named = bool(name_stack.stack)
  compute_type = internals.compute_type(caller)

  def renamed(eqn):  # The most of the time goes here.
    outvars = []
    for v in eqn.outvars:
      bound = env.get(v)
      if bound is None:
        bound = v
        if v in used:
          bound = env[v] = new_var(v.aval)
        elif not isinstance(v, core.DropVar):
          used.add(v)
      outvars.append(bound)
    source_info = eqn.source_info
    if is_named:
      inner = source_info.name_stack
      source_info = source_info.replace(
          name_stack=name_stack + inner if inner.stack else name_stack)
    effects = eqn.effects and internals.rename_input_effects(eqn.effects, env)
    here = eqn.replace(
        invars=[x if isinstance(x, core.Literal) else env.get(x, x)
                for x in eqn.invars],
        outvars=outvars, effects=effects, source_info=source_info)
    if compute_type and not internals.compute_type(eqn):
      here = here.replace(ctx=caller.ctx)
    return here

  return renamed


def _forwarded(eqn: core.JaxprEqn) -> dict[core.Var, core.Atom]:
  """The outputs of a jitted function or of a loop that are inputs of it.

  JAX has found them when it traced the function, as it does, but for those that
  a branch returns.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in ("jit", "pjit"):
    jaxpr = internals.open_jaxpr(params["jaxpr"])
    operands = dict(zip(jaxpr.invars, eqn.invars))
    layouts = params.get("out_layouts") or [None] * len(eqn.outvars)
    return {v: operands[x] for v, x, sharding, layout in zip(
        eqn.outvars, jaxpr.outvars, params["out_shardings"], layouts)
            if isinstance(x, core.Var) and x in operands and layout is None and
            isinstance(sharding, sharding_impls.UnspecifiedValue)}
  if name == "scan":
    # What a branch saves for its derivative may be what is scanned over.
    consts, carry = internals.loop_arity(eqn)
    jaxpr = internals.open_jaxpr(params["jaxpr"])
    operands = dict(zip(jaxpr.invars[consts + carry:],
                        eqn.invars[consts + carry:]))
    return {v: operands[x] for v, x in zip(
        eqn.outvars[carry:], jaxpr.outvars[carry:])
            if isinstance(x, core.Var) and x in operands and
            v.aval == operands[x].aval}
  return {}


def no_branch(branches_platforms, missing: Sequence[str], source_info) -> str:
  """The message that a platform conditional has no branch for platforms."""
  return (
      f"platform_dependent has no branch for {platforms_lib.quote(missing)}, "
      "for which this program is lowered; it has branches for "
      f"{platforms_lib.describe(branches_platforms)}. It is called at "
      f"{internals.user_location(source_info)}. Add a branch `{missing[0]}=` "
      "or `default=`. See docs/pages/errors.md#no-branch.")


def _kernel_platform(eqn: core.JaxprEqn, platform: str) -> Platform | None:
  """What chooses the branches in a kernel; None if it is left as it is."""
  if internals.is_interpreted(eqn):
    return platform
  language = internals.kernel_language(eqn, platform)
  return language and platforms_lib.kernel_platform(language, platform)


def _jaxprs_of_kernel(eqn: core.JaxprEqn) -> list:
  return [*core.jaxprs_in_params(eqn.params), *internals.index_maps(eqn)]


def _choices(eqn: core.JaxprEqn, platform: str) -> Hashable:
  """What tells the kernel for one platform from those for others."""
  kernel_platform = _kernel_platform(eqn, platform)
  if kernel_platform is None:
    return None

  owners = itertools.chain(*(_owners(jaxpr, kernel_platform)
                             for jaxpr in _jaxprs_of_kernel(eqn)))
  return (internals.is_interpreted(eqn) or kernel_platform[0], *owners)


def _owners(jaxpr, platform: Platform) -> Iterator[int | None]:
  """The owner in each platform conditional in a jaxpr, at any depth."""
  for eqn in internals.open_jaxpr(jaxpr).eqns:
    if is_platform_conditional(eqn):
      yield platforms_lib.owner(eqn.params[internals.PLATFORMS], platform)
    for inner in core.jaxprs_in_params(eqn.params):
      yield from _owners(inner, platform)


def _resolve_kernel(eqn: core.JaxprEqn, platform: str) -> core.JaxprEqn:
  """Resolves the call of a kernel for one platform of the module around it.

  Raises:
    NotImplementedError: no branch of something in it is for that platform.
  """
  kernel_platform = _kernel_platform(eqn, platform)
  if kernel_platform is None:
    return eqn

  def resolve_jaxpr(jaxpr):
    return _resolve(jaxpr, (kernel_platform,), Scope.KERNEL)

  eqn = map_jaxprs(eqn, resolve_jaxpr)
  if any(map(resolve_jaxpr, internals.index_maps(eqn))):
    eqn = internals.replace_index_maps(eqn, lambda j: resolve_jaxpr(j) or j)
  for jaxpr in _jaxprs_of_kernel(eqn):
    _raise_deferred_error(jaxpr)
  return eqn


def _raise_deferred_error(jaxpr) -> None:
  # No kernel language has a rule that does so.
  for eqn in internals.open_jaxpr(jaxpr).eqns:
    if eqn.primitive is deferral.deferred_error_p:
      raise eqn.params["deferred"].exception()
    for inner in core.jaxprs_in_params(eqn.params):
      _raise_deferred_error(inner)


def _without_newly_dead(eqns: Sequence[core.JaxprEqn],
                        outvars: Sequence[core.Atom], original: core.Jaxpr
                        ) -> list[core.JaxprEqn]:
  """Drops what only branches used that are not there any more."""
  used_before = {x for eqn in original.eqns for x in eqn.invars
                 if isinstance(x, core.Var)}
  used = {x for x in outvars if isinstance(x, core.Var)}
  alive = []
  for eqn in reversed(eqns):
    if (eqn.effects or used.intersection(eqn.outvars) or
        not used_before.intersection(eqn.outvars)):
      used.update(x for x in eqn.invars if isinstance(x, core.Var))
      alive.append(eqn)
  return alive[::-1]


def map_jaxprs(eqn: core.JaxprEqn, fun) -> core.JaxprEqn:
  """Replaces the jaxprs of an equation for which `fun` returns another one."""
  old, new = [], []

  def recorded(jaxpr):
    result = fun(jaxpr)
    old.append(jaxpr)
    new.append(jaxpr if result is None else result)
    return new[-1]

  params = map_params(eqn.params, recorded)
  if params is eqn.params:
    return eqn
  if eqn.primitive is internals.cond_p:
    # JAX gives the effects of all branches to each of them.
    new = list(map(deferral.with_own_effects, params["branches"]))
    params = {**params, "branches": tuple(new)}
  return eqn.replace(params=params,
                     effects=changed_effects(eqn.effects, old, new))


def map_params(params: dict[str, Any], fun) -> dict[str, Any]:
  """Applies a function to the jaxprs in the params of an equation.

  Args:
    params: the params.
    fun: the function.

  Returns:
    The new params; `params` itself if `fun` returned each jaxpr that it got.
  """
  new = {name: _map_param(param, fun) for name, param in params.items()}
  return params if all(new[k] is v for k, v in params.items()) else new


def _map_param(param, fun):
  if isinstance(param, (tuple, list)):
    values = [_map_param(x, fun) for x in param]
    if all(map(operator.is_, values, param)):
      return param
    make = getattr(type(param), "_make", type(param))
    return make(values)
  return fun(param) if internals.is_jaxpr(param) else param


def changed_effects(effects, old: Sequence, new: Sequence):
  """The effects of an equation once its jaxprs have changed."""
  before = {e for jaxpr in old for e in jaxpr.effects}
  after = {e for jaxpr in new for e in jaxpr.effects}
  return {e for e in effects if internals.is_input_effect(e) or
          e not in before - after} | {
              e for e in after - before if not internals.is_input_effect(e)}
