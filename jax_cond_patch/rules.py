"""Carries the platforms of a conditional through JAX's own rules.

In the added era (up to JAX 0.6.0) JAX's rules for `cond_p` know `branches`
only, and one does so later. Each is run here as it is, with a `cond_p` in its
globals that gives the conditionals that this rule makes the platforms of the
one it was called for. Conditionals inside of the branches are other calls of
the rules, and keep theirs.

In both eras, a rule that fails on some branches is run past these, see
`deferral`, and passes over each branch once where the branches do not differ.
No transformation passes the index of a platform conditional from one part of a
program to another: where it is needed it is made again.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import inspect
import operator
import types
from typing import Any

import jax
from jax._src import core
from jax._src import tree_util
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import conditionals
import numpy as np

from jax_cond_patch import activation
from jax_cond_patch import constants
from jax_cond_patch import deferral
from jax_cond_patch import pinning
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch import resolution
from jax_cond_patch import sharing
from jax_cond_patch.compat import internals

cond_p = internals.cond_p


class _WithPlatforms:
  """Stands for `cond_p` in one of JAX's functions: its conditionals are marked.

  It has `platforms` (and `index`, instead of the one that JAX has computed) for
  those that are bound, and is found again as the primitive of the others.
  """

  def __init__(self, platforms, index=None):
    self.platforms = platforms
    self.index = index

  def bind(self, index, *operands, branches, **params):
    if self.index is not None:
      index = self.index
    return cond_p.bind(index, *operands, branches=branches,
                       **{**params, internals.PLATFORMS: self.platforms})

  def __getattr__(self, name):
    return getattr(cond_p, name)


class _Namespace:
  """A module or class in which some names are other values."""

  def __init__(self, original: Any, **names):
    self.__dict__.update(names)
    self._original = original

  def __getattr__(self, name):
    return getattr(self._original, name)


def cond_bind(original: Callable) -> Callable:
  """For the `bind` that `cond_p` has of its own up to JAX 0.4.35.

  https://github.com/jax-ml/jax/commit/c36e1f7c1a
  """
  def bind(*args, platforms=None, **params):
    if platforms is None:
      return original(*args, **params)

    # JAX's ends in the `bind` of this class.
    axis_primitive = _Namespace(core.AxisPrimitive, bind=functools.partial(
        core.AxisPrimitive.bind, platforms=platforms))
    return internals.with_globals(
        original, core=_Namespace(core, AxisPrimitive=axis_primitive)
    )(*args, **params)

  return bind


_signature = functools.lru_cache(inspect.signature)


@dataclasses.dataclass(frozen=True)
class _OnePass:
  """JAX's transformation of a branch, made once if it can be.

  A rule passes over each branch to learn what its outputs are (zero, unknown,
  batched), joins this over the branches, and passes over each again to make it
  so. The second pass gives what the first one did, for a branch whose outputs
  are what the branches' are together.

  Attributes:
    make: JAX's function of a jaxpr.
    joined: its parameter for what the outputs must be; False the first time.
    found: where in its result stands what the outputs are.
  """
  make: Callable
  joined: str
  found: int

  def __call__(self, jaxpr, *args, **kwargs):
    key = (self, sharing.frozen(args),
           tuple((name, sharing.frozen(x)) for name, x in kwargs.items()))
    return sharing.once(
        jaxpr, key, lambda jaxpr: self._pass(jaxpr, *args, **kwargs))

  def _pass(self, *args, **kwargs):
    call = _signature(self.make).bind(*args, **kwargs)
    outputs = call.arguments.get(self.joined, False)
    if outputs is not False:
      call.arguments[self.joined] = False
      result = self(*call.args, **call.kwargs)
      found = list(result[self.found])
      # A rule of another library may ask for all by one True.
      if all(found) if outputs is True else found == list(outputs):
        return result
    return deferral.spares_primals(self.make, self.found)(*args, **kwargs)


_PASSES = (
    ("ad", "jvp_jaxpr", "instantiate", 1),
    ("ad", "linearize_jaxpr", "instantiate", 2),
    ("pe", "partial_eval_jaxpr_nounits", "instantiate", 2),
    ("pe", "partial_eval_jaxpr_nounits_fwd", "instantiate", 2),
    ("pe", "partial_eval_jaxpr_custom", "ensure_out_unknowns", 2),
    ("batching", "batch_jaxpr", "instantiate", 1),
)


@functools.cache
def _passes_once(fun: types.FunctionType) -> types.FunctionType:
  """Returns a rule of JAX's that passes over each branch once if it can."""
  modules: dict[str, dict[str, Any]] = {}
  for module, name, joined, found in _PASSES:
    make = getattr(fun.__globals__.get(module), name, None)
    if make is not None:
      modules.setdefault(module, {})[name] = _OnePass(make, joined, found)
  names: dict[str, Any] = {
      module: _Namespace(fun.__globals__[module], **passes)
      for module, passes in modules.items()}
  for name, replacement in (
      ("_join_cond_outputs", _join_outputs),
      ("_join_cond_pe_staged_jaxpr_inputs", _join_staged_inputs),
      ("_transpose_cond_jaxpr", _transpose_branch),
      ("_transpose_jaxpr_fancy", _transpose_branch_fancy)):
    if name in fun.__globals__:
      names[name] = replacement
  return internals.with_globals(fun, **names)


def _join_outputs(*args):
  """`_join_cond_outputs`, which makes each branch anew to add residuals."""
  return _join(conditionals._join_cond_outputs, *args)


def _join_staged_inputs(*args):
  """`_join_cond_pe_staged_jaxpr_inputs`, which adds those that are read."""
  return _join(conditionals._join_cond_pe_staged_jaxpr_inputs, *args)


def _join(join: Callable, jaxprs, residuals, residual_indices, *args):
  """Joins each branch once, and not one that has all residuals in order."""
  # Structured residuals are among the arguments since JAX 0.11.1.
  numbers = tuple(x for x in args if isinstance(x, int))
  if any(len(x) for x in args if not isinstance(x, int)):
    return join(jaxprs, residuals, residual_indices, *args)

  def joined(jaxpr, indices):
    if list(indices) == list(range(len(residuals))):
      return jaxpr
    key = (join, tuple(residuals), tuple(indices), numbers)
    return sharing.once(jaxpr, key, lambda jaxpr: join(
        (jaxpr,), residuals, (indices,), *args)[0])

  return tuple(map(joined, jaxprs, residual_indices))


def _transpose_branch(jaxpr, *args):
  """`_transpose_cond_jaxpr`, once for each branch."""
  make = conditionals._transpose_cond_jaxpr
  return sharing.once(
      jaxpr, (make, sharing.frozen(args)), lambda jaxpr: make(jaxpr, *args))


def _transpose_branch_fancy(jaxpr, in_tree, in_avals, specs, instantiate,
                            *log_spec):
  """`_transpose_jaxpr_fancy`, which JAX calls twice, as in `_OnePass`."""
  def make(*joined):
    make = conditionals._transpose_jaxpr_fancy
    args = in_tree, in_avals, specs, *joined
    return sharing.once(jaxpr, (make, *args), lambda jaxpr: make(jaxpr, *args))

  # What is logged, and for which branch, since JAX 0.11.1:
  # it is not known yet the first time.
  first = make((False,) * len(instantiate), *((None, 0) if log_spec else ()))
  if not log_spec or not log_spec[0]:
    transposed, out_tree = first
    cts = tree_util.tree_unflatten(out_tree, transposed.out_avals)
    if log_spec:
      cts, logs = cts
      if logs:
        return make(instantiate, *log_spec)
    if [type(ct) is not ad.Zero for ct in cts] == list(instantiate):
      return first
  return make(instantiate, *log_spec)


def _with_cond_p(fun: types.FunctionType, cond) -> types.FunctionType:
  """Returns a function of JAX's in which `cond` stands for `cond_p`."""
  names: dict[str, Any] = {"cond_p": cond}
  # checkify says `lax.cond_p`, shard_map `control_flow.conditionals.cond_p`.
  if "lax" in fun.__globals__:
    names["lax"] = _Namespace(fun.__globals__["lax"], cond_p=cond)
  if "control_flow" in fun.__globals__:
    names["control_flow"] = _Namespace(
        fun.__globals__["control_flow"],
        conditionals=_Namespace(conditionals, cond_p=cond))
  return internals.with_globals(fun, **names)


# platform_dependent

def platform_dependent_code(*args, default=None, **per_platform):
  # The code of `jax.lax.platform_dependent` itself is replaced by this, for
  # those who have imported the function before. It runs in JAX's module.
  from jax_cond_patch import rules
  return rules.platform_dependent(args, default, per_platform)


def platform_dependent(args, default, per_platform):
  """`jax.lax.platform_dependent`, with branches told apart by identity.

  Args:
    args: the operands, pytrees.
    default: the default branch, or None.
    per_platform: the branches by the name of their platform.

  Returns:
    What the branch of the platform returns.

  Raises:
    TypeError: a branch is not callable.
    ValueError: there is a branch for "gpu".
  """
  for name, branch in (*per_platform.items(), ("default", default)):
    if not callable(branch) and not (name == "default" and branch is None):
      raise TypeError(f"lax.platform_dependent: the '{name}' branch must be a "
                      "callable.")
  if "gpu" in per_platform:
    raise ValueError("Use 'cuda' or 'rocm' for lax.platform_dependent.")
  branches: list[Callable] = []
  names: list[tuple[str, ...]] = []
  for platform, branch in per_platform.items():
    for i, other in enumerate(branches):
      if _is_same_branch(branch, other):
        names[i] = (*names[i], platform)
        break
    else:
      branches.append(branch)
      names.append((platform,))
  branches_platforms: platforms_lib.BranchesPlatforms = tuple(names)
  if default is not None:
    branches.append(default)
    branches_platforms = (*branches_platforms, None)
  pin = activation.pinned()
  if pin is not None and not internals.is_tracing_kernel():
    # Kernels are not marked: other compilers read them.
    reachable = platforms_lib.reachable(branches_platforms, pin)
    # Where there is no branch it may be in one that is not reached, so it is
    # for lowering to say so.
    if reachable.branches:
      pinning.pinned_p.bind(platforms=pin)
      branches = [branches[i] for i in reachable.branches]
      branches_platforms = tuple(
          branches_platforms[i] for i in reachable.branches)
      if len(branches) == 1 and not reachable.missing:
        return branches[0](*args)
  index = internals.bind_platform_index(branches_platforms)
  if internals.is_concrete(index):
    return branches[int(index)](*args)
  return _stage(index, tuple(map(_with_plain_equality, branches)), args,
                branches_platforms)


def _is_same_branch(a: Callable, b: Callable) -> bool:
  return a is b or _is_plainly_equal(a, b)


def _is_plainly_equal(a: Callable, b: Callable) -> bool:
  try:
    return (a == b) is True
  except Exception:
    # The `==` of a callable that holds arrays compares these, and their truth
    # value is an error.
    return False


def _with_plain_equality(branch: Callable) -> Callable:
  """Makes a branch a key for JAX's caches, which compare it with others.

  They compare it with any branch, of another program too: which ones, that
  depends on hashes. So no `==` of the user's can stay.
  """
  # Two bound methods are equal if they are of the same object.
  if (type(branch).__eq__ is object.__eq__ or
      isinstance(branch, types.MethodType)):
    return branch
  return lambda *args: branch(*args)


def _stage(index, branches, args, branches_platforms):
  """Stages a platform conditional out, traced and checked as JAX does it."""
  cond = _Staged(branches_platforms)
  if internals.native:
    return internals.with_globals(
        internals.undecorated(conditionals._switch_internal), cond_p=cond)(
            index, branches, args, branches_platforms=branches_platforms)
  if len(branches) == 1:
    # `switch` calls a single branch, for whatever platform. It gets the branch
    # twice, which traces it once, and `_Staged` drops the second.
    branches *= 2
  switch = internals.undecorated(conditionals.switch)
  lax = _Namespace(switch.__globals__["lax"], clamp=lambda lo, x, hi: x)
  cond.index = index
  return internals.with_globals(switch, lax=lax, cond_p=cond)(
      index, branches, *args)


class _Staged(_WithPlatforms):
  """The `cond_p` of a platform conditional that is being staged out."""

  def bind(self, index, *operands, branches, **params):
    return super().bind(index, *operands,
                        branches=branches[:len(self.platforms)], **params)


# Evaluation

def impl(rule: Callable) -> Callable:
  """For a conditional that is run at once: `cond_p.impl`.

  JAX compiles it with the index as an argument. If that can't be lowered, it
  gets the branch taken alone.
  """
  def cond_impl(index, *operands, **params):
    if params.get(internals.PLATFORMS) is not None:
      return rule(index, *operands, **params)

    def bind(*args):
      return cond_p.bind(*args, **params)
    try:
      return rule(index, *operands, **params)
    except Exception:
      try:
        jax.jit(bind).lower(index, *operands)
      except Exception:
        pass
      else:
        raise  # It has run.
    branch = params["branches"][constants.taken(params["branches"], index)]
    return rule(index, *operands, **{**params, "branches": (branch,)})

  return cond_impl


def takes_known_branch(index_of: Callable, begins_differentiation: bool = False
                       ) -> Callable:
  """Decorates the making of a rule: it transforms only the branch taken.

  That is, of an ordinary conditional whose index is known already, if JAX's
  rule fails on the branches together.

  Args:
    index_of: returns the index, given the arguments of the rule.
    begins_differentiation: whether it is too early to tell if it fails: it may
      do so at the end, and outside of a rule. Then the branch taken is
      transformed alone unless the others can surely be differentiated.

  Returns:
    A decorator.
  """
  def decorator(make_rule: Callable) -> Callable:
    @functools.wraps(make_rule)
    def make(original: Callable) -> Callable:
      rule = make_rule(original)

      def taking_rule(*args, **params):
        if params.get(internals.PLATFORMS) is not None:
          return rule(*args, **params)
        index = constants.known_to_trace(index_of(*args))
        if index is None:
          return rule(*args, **params)
        branches = params["branches"]
        taken = constants.taken(branches, index)
        if not begins_differentiation or all(
            _is_differentiable(branch) for i, branch in enumerate(branches)
            if i != taken):
          try:
            return rule(*args, **params)
          except Exception:
            pass
        return rule(*args, **{**params, "branches": (branches[taken],)})

      return taking_rule
    return make
  return decorator


@internals.weakref_lru_cache
def _is_differentiable(jaxpr) -> bool:
  """Whether a jaxpr has a derivative of any kind for sure."""
  return all(map(_is_differentiable_eqn, internals.open_jaxpr(jaxpr).eqns))


def _is_differentiable_eqn(eqn: core.JaxprEqn) -> bool:
  if eqn.effects:
    return False
  if jaxprs := internals.jaxprs_in_params(eqn.params):
    return (eqn.primitive.name in _DIFFERENTIABLE_WITH_JAXPRS and
            all(map(_is_differentiable, jaxprs)))
  return not eqn.invars or (eqn.primitive in ad.primitive_jvps and
                            eqn.primitive in internals.lax_primitives())


# They are as differentiable as their jaxprs are.
_DIFFERENTIABLE_WITH_JAXPRS = frozenset([
    "checkpoint", "closed_call", "cond", "core_call", "jit", "pjit", "remat",
    "remat2", "scan"])


# Rules for cond_p.

def _run(rule: types.FunctionType, cond, args, params,
         transformation: deferral.Transformation):
  """Runs JAX's rule for a platform conditional, past branches it fails on.

  Args:
    rule: the function of JAX's.
    cond: what stands for `cond_p` in it.
    args: the arguments of the rule.
    params: the params of the conditional.
    transformation: what the rule does.

  Returns:
    What the rule returns.
  """
  platforms = params[internals.PLATFORMS]
  if not internals.native:
    params = {k: v for k, v in params.items() if k != internals.PLATFORMS}

  def run(cond, branches):
    fun = _with_cond_p(_passes_once(rule), cond)
    return fun(*args, **{**params, "branches": branches})

  branches = tuple(map(sharing.shared, params["branches"]))
  return deferral.run(run, cond, branches, platforms, transformation, args)


def carries_platforms(rule: Callable, transformation: deferral.Transformation
                      ) -> Callable:
  """For rules that bind `cond_p`: transpose, checkify, discharge, ..."""
  function = internals.undecorated(rule)

  def carrying_rule(*args, **params):
    platforms = params.get(internals.PLATFORMS)
    if platforms is None:
      return rule(*args, **params)
    # Since JAX has the param, its rules pass it on by themselves.
    cond = cond_p if internals.native else _WithPlatforms(platforms)
    return _run(function, cond, args, params, transformation)

  return carrying_rule


class _Jvp(_WithPlatforms):
  """The `cond_p` of the rule that differentiates these branches."""

  def __init__(self, platforms, branches):
    super().__init__(platforms)
    self.branches = branches

  def bind(self, index, *operands, branches, **params):
    deferral.record_jvp(self.branches, branches)
    return super().bind(index, *operands, branches=branches, **params)


@takes_known_branch(lambda primals, tangents: primals[0],
                    begins_differentiation=True)
def jvp(rule: Callable) -> Callable:
  """For the jvp rule."""
  function = internals.undecorated(rule)
  transformation = deferral.Transformation(
      "forward-mode differentiation (jvp)", differentiates=True,
      changed=lambda _, tangents: [type(t) is not ad.Zero for t in tangents])

  def jvp_rule(primals, tangents, **params):
    platforms = params.get(internals.PLATFORMS)
    if platforms is None:
      return rule(primals, tangents, **params)
    cond = _Jvp(platforms, params["branches"])
    return _run(function, cond, (primals, tangents), params, transformation)

  return jvp_rule


checkify = functools.partial(
    carries_platforms, transformation=deferral.Transformation("checkify"))
discharge = functools.partial(
    carries_platforms,
    transformation=deferral.Transformation("the discharge of state"))
remat = functools.partial(
    carries_platforms,
    transformation=deferral.Transformation("rematerialization"))
_TRANSPOSITION = deferral.Transformation(
    "transposition (of reverse-mode differentiation)")
fancy_transpose = functools.partial(
    carries_platforms, transformation=_TRANSPOSITION)


shard_map_rewrite = functools.partial(
    carries_platforms,
    transformation=deferral.Transformation("shard_map with check_rep=True"))


def shard_map_check(rule: Callable) -> Callable:
  """For the rule that says over which axes of a mesh outputs are replicated.

  It wants the same of all branches, but a deferred error has no value.
  """
  def check_rule(mesh, *in_rep, branches, platforms=None):
    if platforms is None:
      return rule(mesh, *in_rep, branches=branches)
    by_branch = [rule(mesh, *in_rep, branches=(branch,)) for branch in branches]
    by_output = [[rep for rep in reps if rep is not None] or [None]
                 for reps in zip(*by_branch)]
    if any(rep != reps[0] for reps in by_output for rep in reps):
      return rule(mesh, *in_rep, branches=branches)  # which raises
    return [reps[0] for reps in by_output]

  return check_rule


def check_own(primitive: core.Primitive, mesh, *in_rep, out_avals=(),
              **params):
  """The rule for checks of the primitives of our own: nothing is known."""
  del primitive, mesh, in_rep, params
  return [None] * len(out_avals)


def rewrite_own(primitive: core.Primitive, mesh, in_rep, *args, **params):
  """The rule for rewrites of the primitives of our own, which does nothing."""
  del in_rep
  outs = primitive.bind(*args, **params)
  return outs, [set(mesh.axis_names)] * len(outs)


def passes_effects(rule: Callable, transformation: deferral.Transformation
                   ) -> Callable:
  """For rules of other primitives, that refuse the effects of their jaxprs."""
  if isinstance(rule, functools.partial):
    # See `batching`.
    return functools.partial(
        passes_effects(rule.func, transformation), *rule.args)

  def passing_rule(*args, **params):
    try:
      return rule(*args, **params)
    except Exception as error:
      passable = (_without_effects(params, transformation, error)
                  if deferral.enabled else params)
      if passable is params:
        raise
      try:
        return rule(*args, **passable)
      except Exception:
        raise error

  return passing_rule


def _without_effects(params, transformation: deferral.Transformation,
                     error: Exception):
  """Defers the error of the effects of branches in the jaxprs of an equation.

  Args:
    params: the params of the equation.
    transformation: what the rule does that refuses these effects.
    error: the error that it raises.

  Returns:
    Params in whose jaxprs the effects are left that all branches have, or
    `params` if these are all.
  """
  def passable(jaxpr):
    old = internals.open_jaxpr(jaxpr).eqns
    eqns = list(map(new_eqn, old))
    if all(map(operator.is_, eqns, old)):
      return jaxpr
    return deferral.with_own_effects(internals.map_jaxpr(
        lambda j: j.replace(eqns=eqns, debug_info=j.debug_info), jaxpr))

  def new_eqn(eqn):
    eqn = resolution.map_jaxprs(eqn, passable)
    if not resolution.is_platform_conditional(eqn):
      return eqn
    old = eqn.params["branches"]
    new = deferral.without_effects(
        old, eqn.params[internals.PLATFORMS], transformation, error)
    return eqn if all(map(operator.is_, old, new)) else eqn.replace(
        params={**eqn.params, "branches": new},
        effects=resolution.changed_effects(eqn.effects, old, new))

  return resolution.map_params(params, passable)


remat_partial_eval = functools.partial(
    passes_effects, transformation=deferral.Transformation(
        "rematerialization (jax.checkpoint)"))


def remat_method(method: Callable) -> Callable:
  """For the methods of `RematTraced`, whose params are its own."""
  def rule(remat, *args, **params):
    return method(type(remat)(**params), *args)

  passing_rule = remat_partial_eval(rule)
  return lambda remat, *args: passing_rule(remat, *args, **remat.params)


while_batching = functools.partial(
    passes_effects, transformation=deferral.Transformation(
        "batching (vmap) of a while loop"))


def passes_platforms(rule: Callable) -> Callable:
  """For rules that know only `branches` and bind `cond_p`, in both eras."""
  function = internals.undecorated(rule)

  def passing_rule(*args, **params):
    platforms = params.pop(internals.PLATFORMS, None)
    if platforms is None:
      return rule(*args, **params)
    return _with_cond_p(function, _WithPlatforms(platforms))(*args, **params)

  return passing_rule


def ignores_platforms(rule: Callable) -> Callable:
  """For rules that make no conditional: checks."""
  def ignoring_rule(*args, platforms=None, **params):
    del platforms
    return rule(*args, **params)
  return ignoring_rule


def transpose(rule: Callable) -> Callable:
  """For the transpose rule up to JAX 0.8.1, in both eras.

  In a jaxpr with effects `ad.backward_pass` does not evaluate what depends on
  no cotangent, and so the index is undefined where it is made again.

  JAX's rule computes with the cotangents that are zero, which a branch that is
  called does not do. What they are of is dropped before.
  """
  carrying_rule = carries_platforms(rule, _TRANSPOSITION)

  # Up to JAX 0.4.25 `reduce_axes` come first:
  # https://github.com/jax-ml/jax/commit/3736b322b7
  position = 2 if internals.takes(rule, "reduce_axes") else 1

  def transpose_rule(*args, **params):
    platforms = params.get(internals.PLATFORMS)
    if platforms is None:
      return rule(*args, **params)
    *reduce_axes, cts, index = args[:position + 1]
    operands = args[position + 1:]
    if ad.is_undefined_primal(index):
      index = internals.bind_platform_index(platforms)
    nonzero = [type(ct) is not ad.Zero for ct in cts]
    is_used, params = _drop_outputs(nonzero, params)
    outs = iter(carrying_rule(
        *reduce_axes, [ct for ct, nz in zip(cts, nonzero) if nz], index,
        *(x for x, used in zip(operands, is_used) if used), **params))
    return [next(outs) if used else None for used in (True, *is_used)]

  return transpose_rule


def _drop_outputs(kept: list[bool], params: dict[str, Any]
                  ) -> tuple[list[bool], dict[str, Any]]:
  """Drops outputs of a conditional, and what they alone are computed from.

  Args:
    kept: for each output, whether it is kept.
    params: the params of the conditional.

  Returns:
    For each operand, whether it is kept; and the params.
  """
  branch, *_ = branches = params["branches"]
  if all(kept):
    return [True] * len(branch.in_avals), params
  new_var = core.gensym()
  invars = [new_var(core.ShapedArray((), np.int32)),
            *map(new_var, branch.in_avals)]
  eqn = core.new_jaxpr_eqn(
      invars, list(map(new_var, branch.out_avals)), cond_p, params,
      core.join_effects(*(branch.effects for branch in branches)))
  (_, *is_used), eqn = pe.dce_rules[cond_p](kept, eqn)
  return is_used, eqn.params


@takes_known_branch(lambda *args: args[-2][0])
def batching(rule: Callable) -> Callable:
  """For the batching rule, which binds `cond_p` if the index is not mapped.

  A platform does not differ between the elements of a batch. An index that is
  mapped nevertheless is made again, as JAX does since 0.6.2 (0.6.1 asserts that
  there is none): https://github.com/jax-ml/jax/commit/31ef2cf243.
  """
  if isinstance(rule, functools.partial):
    # Of the two tables up to JAX 0.4.35, this one has the rule without the
    # name of an axis: https://github.com/jax-ml/jax/commit/c36e1f7c1a.
    return functools.partial(batching(rule.func), *rule.args)
  transformation = deferral.Transformation(
      "batching (vmap)",
      changed=lambda *args: [dim is not None for dim in args[-1]])
  carrying_rule = carries_platforms(rule, transformation)

  def batching_rule(*args, **params):
    *axis, args, dims = args
    platforms = params.get(internals.PLATFORMS)
    if platforms is not None and dims[0] is not None:
      args = (internals.bind_platform_index(platforms), *args[1:])
      dims = (None, *dims[1:])
    return carrying_rule(*axis, args, dims, **params)

  return batching_rule


_PARTIAL_EVALUATION = "partial evaluation (of reverse-mode differentiation)"


def partial_eval_custom(rule: Callable) -> Callable:
  """For the partial evaluation of an equation, which returns two equations."""
  function = internals.undecorated(rule)
  transformation = deferral.Transformation(
      _PARTIAL_EVALUATION,
      changed=lambda saveable, unks_in, inst_in, eqn: unks_in)

  def partial_eval_custom_rule(saveable, unks_in, inst_in, eqn):
    platforms = eqn.params.get(internals.PLATFORMS)
    if platforms is None:
      return rule(saveable, unks_in, inst_in, eqn)

    def run(_, branches):
      return _passes_once(function)(saveable, unks_in, inst_in, eqn.replace(
          params={**eqn.params, "branches": branches}))

    known, staged, *rest = deferral.run(
        run, cond_p, eqn.params["branches"], platforms, transformation,
        (saveable, unks_in, inst_in, eqn))
    return _marked(known, eqn), _marked(staged, eqn), *rest

  return partial_eval_custom_rule


def dce(rule: Callable) -> Callable:
  """For the rule for dead code up to JAX 0.10, which returns an equation.

  It keeps the params, but up to JAX 0.5.0 not the context:
  https://github.com/jax-ml/jax/commit/bc1a706688. And it closes the jaxprs of
  the branches, which JAX's caches know, to others that they do not know.
  """
  def dce_rule(used_outputs, eqn):
    used_inputs, new_eqn = rule(used_outputs, eqn)
    return used_inputs, _marked(new_eqn, eqn)

  return dce_rule


def _marked(new_eqn, eqn):
  """Gives a conditional the platforms and the context of the one it is of."""
  platforms = eqn.params.get(internals.PLATFORMS)
  if new_eqn is None or new_eqn.primitive is not cond_p or platforms is None:
    return new_eqn
  branches = tuple(map(sharing.closed, new_eqn.params["branches"]))
  new_eqn = new_eqn.replace(params={
      **new_eqn.params, "branches": branches, internals.PLATFORMS: platforms})
  return new_eqn.replace(ctx=eqn.ctx) if hasattr(eqn, "ctx") else new_eqn


def partial_eval(rule: Callable) -> Callable:
  """For partial evaluation by tracing, in both eras.

  The known part binds `cond_p`; the unknown part is the recipe of the tracers
  that are returned, and its index is a known value of the other part.
  """
  function = internals.undecorated(rule)
  transformation = deferral.Transformation(
      _PARTIAL_EVALUATION,
      changed=lambda trace, *tracers: [not t.is_known() for t in tracers])

  def partial_eval_rule(trace, *tracers, **params):
    platforms = params.get(internals.PLATFORMS)
    if platforms is None:
      return rule(trace, *tracers, **params)
    if not tracers[0].is_known():
      return trace.default_process_primitive(cond_p, tracers, params)
    outs = _run(function, _WithPlatforms(platforms), (trace, *tracers), params,
                transformation)
    _renew_staged_index(trace, outs, platforms)
    return outs

  return partial_eval_rule


def _renew_staged_index(trace, outs, platforms) -> None:
  """Gives the recipe of a staged conditional platforms and its own index."""
  staged = [t for t in outs if isinstance(t, pe.JaxprTracer) and
            isinstance(t.recipe, pe.JaxprEqnRecipe) and
            isinstance(t.recipe.primitive, (_WithPlatforms, core.Primitive)) and
            t.recipe.primitive.name == cond_p.name]
  if not staged:
    return
  recipe = staged[0].recipe
  index = pe.JaxprTracer(
      trace, pe.PartialVal.unknown(recipe.in_tracers[0].aval), None)
  index.recipe = internals.jaxpr_eqn_recipe(
      trace, [], [index], internals.platform_index_p,
      internals.platform_index_params(platforms), set(), recipe.source_info)
  # Recipes are put in the order of their ids since JAX 0.6.2, so the index
  # takes that of the conditional, which takes the later one:
  # https://github.com/jax-ml/jax/commit/859e120fdd
  index.recipe, renewed_id = (index.recipe._replace(eqn_id=recipe.eqn_id),
                              index.recipe.eqn_id)
  renewed = recipe._replace(
      eqn_id=renewed_id, in_tracers=(index, *recipe.in_tracers[1:]),
      primitive=cond_p,
      params={**recipe.params, internals.PLATFORMS: platforms})
  for tracer in staged:
    assert tracer.recipe is recipe
    tracer.recipe = renewed


@takes_known_branch(lambda *args: internals.linearization_inputs(args)[1][0],
                    begins_differentiation=True)
def linearize(rule: Callable) -> Callable:
  """For linearization (JAX 0.7.1 and later): the index is no residual."""
  def nonzeros_in(*args):
    return internals.linearization_inputs(args)[0]

  carrying_rule = carries_platforms(rule, deferral.Transformation(
      "linearization (of reverse-mode differentiation)", changed=nonzeros_in,
      differentiates=True))

  def linearize_rule(*args, **params):
    out = carrying_rule(*args, **params)
    platforms = params.get(internals.PLATFORMS)
    primals, nonzeros, residuals, *structured, tangent_fun = out
    # With structured residuals, since JAX 0.11.1, these hold the index.
    if platforms is None or (structured and structured[0] is not None):
      return out

    def tangent_fun_with_index(residuals, *args):
      index = internals.bind_platform_index(platforms)
      return tangent_fun([index, *residuals], *args)

    _, *residuals = residuals
    return primals, nonzeros, residuals, *structured, tangent_fun_with_index

  return linearize_rule


# A rule for run_state_p

def run_state_jvp(rule: Callable) -> Callable:
  """For the jvp of a function that has references of its own.

  Up to JAX 0.7.0 reverse mode fails where a branch reads or writes one, which a
  branch that is called may do. What becomes of a `run_state` when it is lowered
  is differentiated there: a function of values.
  """
  def run_state_jvp_rule(primals, tangents, *, jaxpr, **params):
    if not _has_references_in_branches(jaxpr) or any(
        internals.is_ref(core.get_aval(x)) for x in primals):
      return rule(primals, tangents, jaxpr=jaxpr, **params)
    jvp_jaxpr, nonzero = ad.jvp_jaxpr(
        internals.discharged(jaxpr),
        [type(t) is not ad.Zero for t in tangents], False)
    outs = core.jaxpr_as_fun(jvp_jaxpr)(
        *primals, *(t for t in tangents if type(t) is not ad.Zero))
    primals_out, tangents_out = outs[:len(nonzero)], iter(outs[len(nonzero):])
    return primals_out, [
        next(tangents_out) if nz else
        ad.Zero(internals.tangent_aval(core.get_aval(x)))
        for x, nz in zip(primals_out, nonzero)]

  return run_state_jvp_rule


def _has_references_in_branches(jaxpr) -> bool:
  return any(
      (eqn.primitive is cond_p and
       eqn.params.get(internals.PLATFORMS) is not None and
       any(map(internals.is_input_effect, eqn.effects))) or
      any(map(_has_references_in_branches, core.jaxprs_in_params(eqn.params)))
      for eqn in internals.open_jaxpr(jaxpr).eqns)


# Rules for platform_index_p

def platform_index_partial_eval_custom(saveable, unks_in, inst_in, eqn):
  """Has the index on both sides, so that it is never a residual."""
  del saveable, unks_in, inst_in
  return eqn, eqn, [False], [True], []


def platform_index_transpose(ct, **params):
  """It has no inputs to give cotangents to."""
  del ct, params
  return []
