"""Errors of code that may not be reached, kept until it is.

A program may hold code that cannot be lowered or transformed for some
platforms and is not reached on others. Whether it is reached is known when it
is lowered, so the error waits until then: it becomes an equation that raises it
when it is lowered.

A rule of JAX's for conditionals transforms each branch. Where it raises, it is
tried on each branch alone. If it raises for some of them only, these are
replaced by branches that hold the error, and the rule is run again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any
import weakref

from jax._src import core
from jax._src import debugging
from jax._src import dtypes
from jax._src import effects as effects_lib
from jax._src import source_info_util
from jax._src.interpreters import ad

from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals

# Whether errors of transformations are deferred. `activate` sets it.
enabled = True


@dataclasses.dataclass(frozen=True)
class DeferredError:
  """An error to raise when an equation is lowered.

  It holds nothing of the exception but its class and text, and so is the same
  whenever the same program is traced.

  Attributes:
    type: the class of the exception.
    message: its text.
  """
  type: type[Exception]
  message: str

  def __repr__(self) -> str:
    return f"{self.type.__name__}({self.message!r})"

  def exception(self) -> Exception:
    """Makes the exception anew."""
    try:
      exception = self.type(self.message)
      if self.message in str(exception):
        return exception
    except Exception:
      pass
    # Its class wants other arguments than a text, or shows them otherwise.
    as_text: Any = type(self.type.__name__, (self.type,), dict(
        __init__=lambda self, *_: None, __module__=self.type.__module__,
        __str__=lambda self: self.args[0]))
    other = as_text.__new__(as_text, self.message)
    other.args = (self.message,)
    return other


# deferred_error_p: raises if it is lowered. It takes what its outputs depend
# on, and they are unknown, have tangents, and so on, if one of these does.

# Of an error that must not be lost, though its outputs are not used. JAX allows
# it wherever it allows debug callbacks.
class DeferredErrorEffect(debugging.DebugEffect):
  __str__ = lambda self: "DeferredError"


deferred_error_effect = DeferredErrorEffect()
deferred_error_p = core.Primitive("deferred_error")
deferred_error_p.multiple_results = True


@deferred_error_p.def_impl
def _deferred_error_impl(*_, deferred: DeferredError, **__):
  raise deferred.exception()


@deferred_error_p.def_effectful_abstract_eval
def _deferred_error_abstract_eval(*_, deferred, out_avals, effectful):
  del deferred
  return list(out_avals), {deferred_error_effect} if effectful else set()


def deferred_error_lowering(ctx, *_, deferred: DeferredError, **__):
  del ctx
  raise deferred.exception()


def deferred_error_jvp(primals, tangents, *, out_avals, **params):
  outs = deferred_error_p.bind(*primals, out_avals=out_avals, **params)
  return outs, _deferred_tangents(
      primals, tangents, out_avals, [True] * len(out_avals), params["deferred"])


def _deferred_tangents(primals, tangents, out_avals, nonzero: Sequence[bool],
                       error: DeferredError):
  """The error as tangents, or zeros for outputs without."""
  avals = list(map(internals.tangent_aval, out_avals))
  has_tangent = [nz and getattr(aval, "dtype", None) != dtypes.float0
              for nz, aval in zip(nonzero, avals)]
  outs = iter(deferred_error_p.bind(
      *primals, *(t for t in tangents if type(t) is not ad.Zero),
      deferred=error, effectful=False,
      out_avals=tuple(a for a, d in zip(avals, has_tangent) if d)))
  return [next(outs) if d else ad.Zero(a) for a, d in zip(avals, has_tangent)]


def deferred_error_transpose(cts, *args, deferred, effectful, out_avals):
  del out_avals
  linear = [ad.is_undefined_primal(x) for x in args]
  outs = iter(deferred_error_p.bind(
      *(x for x, is_linear in zip(args, linear) if not is_linear),
      *(ct for ct in cts if type(ct) is not ad.Zero), deferred=deferred,
      effectful=effectful,
      out_avals=tuple(internals.cotangent_aval(x.aval)
                      for x, is_linear in zip(args, linear) if is_linear)))
  return [next(outs) if is_linear else None for is_linear in linear]


def deferred_error_batching(*axis_args_dims, **params):
  # The outputs are the same for all elements of the batch: none has a value.
  *_, args, _ = axis_args_dims
  outs = deferred_error_p.bind(*args, **params)
  return outs, [None] * len(outs)


def deferred_error_eqn(eqn: core.JaxprEqn, error: DeferredError
                       ) -> core.JaxprEqn:
  """Returns an equation with the outputs of `eqn` that raises when lowered."""
  params = dict(deferred=error, out_avals=tuple(v.aval for v in eqn.outvars),
                effectful=bool(eqn.effects))
  return eqn.replace(invars=[], primitive=deferred_error_p, params=params,
                     effects=_effects(params))


def _effects(params) -> set:
  return {deferred_error_effect} if params["effectful"] else set()


# undifferentiable_p: a branch that cannot be differentiated. It only ever meets
# differentiation, which leaves its primal outputs and an error for the others.

undifferentiable_p = core.Primitive("undifferentiable")
undifferentiable_p.multiple_results = True


@undifferentiable_p.def_effectful_abstract_eval
def _undifferentiable_abstract_eval(*_, jaxpr, **__):
  return jaxpr.out_avals, jaxpr.effects


def undifferentiable_jvp(primals, tangents, *, jaxpr, nonzero, error):
  outs = core.jaxpr_as_fun(jaxpr)(*primals)
  return outs, _deferred_tangents(
      primals, tangents, jaxpr.out_avals, nonzero, error)


# Running JAX's rules.

class _Done(BaseException):
  """Raised where a rule that is tried binds its conditional."""


class _Trial:
  """Stands for `cond_p` in a rule that is tried.

  All of JAX's rules transform all branches before they bind a conditional.
  Nothing has been done by then that could be seen from outside.
  """

  def bind(self, *_, **__):
    raise _Done

  def __getattr__(self, name):
    return getattr(internals.cond_p, name)


@dataclasses.dataclass(frozen=True)
class Transformation:
  """What a rule does to the branches of a conditional.

  Attributes:
    name: what it is called in messages.
    changed: says, given the arguments of the rule, for each operand of the
      conditional whether the transformation changes it: has a tangent, is
      mapped, ...; the index comes first. None for all.
    differentiates: whether the rule gives each output a tangent.
  """
  name: str
  changed: Callable[..., Sequence[bool]] | None = None
  differentiates: bool = False


# What is no error of a branch; to try the branches then takes forever.
_OF_PYTHON = (RecursionError, MemoryError)


def run(rule: Callable[[Any, Sequence], Any], cond, branches: Sequence,
        platforms: platforms_lib.BranchesPlatforms,
        transformation: Transformation, args: Sequence):
  """Runs a rule for a platform conditional, past branches that it fails on.

  Args:
    rule: runs the rule, given what is to stand for `cond_p` in it, and
      branches.
    cond: what stands for `cond_p`.
    branches: the branches of the conditional.
    platforms: the platforms of the branches.
    transformation: what the rule does.
    args: the arguments of the rule.

  Returns:
    What the rule returns.

  Raises:
    Exception: what the rule raises, if it does so for every branch.
  """
  try:
    return rule(cond, branches)
  except Exception as error:
    if not enabled or len(branches) == 1 or isinstance(error, _OF_PYTHON):
      raise
    branches = tuple(map(with_own_effects, branches))
    errors: list[DeferredError | None] = []
    for branch, names in zip(branches, platforms):
      try:
        rule(_Trial(), (branch,) * len(branches))
      except _Done:
        errors.append(None)
      except _OF_PYTHON:
        raise
      except Exception as branch_error:
        errors.append(_deferred(
            branch_error, names, transformation, _location(branch_error)))
      else:  # it has no conditional to bind
        errors.append(None)
    if all(errors) or not any(errors):
      raise
    changed = (transformation.changed(*args)[1:] if transformation.changed
               else [True] * len(branches[0].in_avals))
    stand_ins = tuple(
        branch if e is None else _stand_in(
            branch, changed, e, transformation.differentiates)
        for branch, e in zip(branches, errors))
    try:
      return rule(cond, stand_ins)
    except Exception:
      raise error


def with_own_effects(jaxpr):
  """Gives a jaxpr the effects of its equations, and no others."""
  def own(jaxpr):
    of_eqns = {e for eqn in jaxpr.eqns for e in eqn.effects}
    # Those of inputs are named by other variables, or numbers, in equations.
    effects = {*filter(internals.is_input_effect, jaxpr.effects),
               *(e for e in of_eqns if not internals.is_input_effect(e))}
    if effects == set(jaxpr.effects):
      return jaxpr
    return jaxpr.replace(effects=effects, debug_info=jaxpr.debug_info)
  return internals.map_jaxpr(own, jaxpr)


def _refused_effects(jaxpr) -> list:
  """The effects that rules of JAX refuse to have in what they transform."""
  return effects_lib.remat_allowed_effects.filter_not_in(jaxpr.effects)


def without_effects(branches: Sequence,
                    platforms: platforms_lib.BranchesPlatforms,
                    transformation: Transformation, error: Exception
                    ) -> Sequence:
  """Replaces the branches whose effects a rule refuses, if not all have them.

  Args:
    branches: the branches of a conditional.
    platforms: the platforms of the branches.
    transformation: what the rule does to a program that they are part of.
    error: the error that the rule raises.

  Returns:
    The branches with their own effects, of which some are stand-ins.
  """
  own = tuple(map(with_own_effects, branches))
  refused = [bool(_refused_effects(branch)) for branch in own]
  if all(refused):
    return branches
  return tuple(
      _stand_in(branch, [False] * len(branch.in_avals), _deferred(
          error, names, transformation, _location_of_effects(branch)),
                differentiates=False) if has_refused else branch
      for branch, names, has_refused in zip(own, platforms, refused))


def _location_of_effects(branch) -> str:
  eqn = next(eqn for eqn in internals.open_jaxpr(branch).eqns
             if _refused_effects(eqn))
  return internals.user_location(eqn.source_info)


def _deferred(error: Exception, names: tuple[str, ...] | None,
              transformation: Transformation, location: str) -> DeferredError:
  branch = ("default branch" if names is None else
            f"branch for {', '.join(map(repr, names))}")
  return DeferredError(type(error), (
      f"{error}\n\nThis error was deferred by jax_cond_patch. The {branch} of "
      f"platform_dependent raised it under {transformation.name}, at "
      f"{location}. It comes now, since the program is lowered for a "
      "platform that runs this branch. See "
      "docs/pages/errors.md#deferred-error."))


def _location(error: Exception) -> str:
  """Where in the user's code the operation is that a rule failed on."""
  found = internals.user_location(source_info_util.current())
  traceback = error.__traceback__
  while traceback is not None:
    # All of JAX's interpreters of jaxprs call it so.
    eqn = traceback.tb_frame.f_locals.get("eqn")
    if isinstance(eqn, core.JaxprEqn):
      found = source_info_util.summarize(eqn.source_info) or found
    traceback = traceback.tb_next
  return found


def _stand_in(branch, changed: Sequence[bool], error: DeferredError,
              differentiates: bool):
  """Replaces a branch by one with the same inputs and outputs.

  Args:
    branch: the branch, on which a rule fails.
    changed: for each input, whether the transformation changes it.
    error: the error that the rule raises.
    differentiates: whether the rule gives each output a tangent.

  Returns:
    A branch whose outputs that depend on a changed input are the error, or, if
    the rule differentiates, have the error as their tangents.
  """
  jaxpr = internals.open_jaxpr(branch)
  dependent = {v for v, c in zip(jaxpr.invars, changed) if c}
  for eqn in jaxpr.eqns:
    if eqn.effects or any(map(_contains(dependent), eqn.invars)):
      dependent.update(eqn.outvars)
  is_dependent = _contains(dependent)
  nonzero = tuple(map(is_dependent, jaxpr.outvars))
  new_var = core.gensym()
  if differentiates:
    outvars = [new_var(v.aval) for v in jaxpr.outvars]
    eqns = [core.new_jaxpr_eqn(
        jaxpr.invars, outvars, undifferentiable_p,
        dict(jaxpr=branch, nonzero=nonzero, error=error), jaxpr.effects)]
  else:
    outvars = [new_var(v.aval) if nz else v
               for v, nz in zip(jaxpr.outvars, nonzero)]
    eqns = [eqn for eqn in jaxpr.eqns
            if not any(map(is_dependent, eqn.outvars)) and not eqn.effects]
    inputs_of = _inputs_by_variable(jaxpr)
    # Each output on its own, since what one depends on makes all outputs of an
    # equation unknown, mapped and so on.
    raising = [(inputs_of[old], [new]) for old, new, nz in zip(
        jaxpr.outvars, outvars, nonzero) if nz]
    if jaxpr.effects:
      raising.append((set(), []))
    for inputs, deferred in raising:
      params = dict(deferred=error, out_avals=tuple(v.aval for v in deferred),
                    effectful=not deferred)
      operands = [v for v in jaxpr.invars
                  if v in inputs and not internals.is_ref(v.aval)]
      eqns.append(core.new_jaxpr_eqn(
          operands, deferred, deferred_error_p, params, _effects(params)))
  effects = core.join_effects(*(eqn.effects for eqn in eqns))
  return internals.map_jaxpr(lambda j: j.replace(
      eqns=eqns, outvars=outvars, effects=effects, debug_info=j.debug_info),
                             branch)


def _inputs_by_variable(jaxpr: core.Jaxpr) -> dict[core.Var, set[core.Var]]:
  """The inputs that each variable depends on."""
  inputs: dict[core.Var, set[core.Var]] = {v: {v} for v in jaxpr.invars}
  by_effects: set[core.Var] = set()  # What is read may have been written.
  for eqn in jaxpr.eqns:
    read = set().union(*(inputs.get(x, ()) for x in eqn.invars
                         if isinstance(x, core.Var)))
    if eqn.effects:
      by_effects |= read
      read |= by_effects
    inputs.update(dict.fromkeys(eqn.outvars, read))
  return inputs


def _contains(variables: set) -> Callable[[core.Atom], bool]:
  return lambda atom: isinstance(atom, core.Var) and atom in variables


# A kernel whose jvp is one operation computes its primal output together with
# the tangent. Where the tangent is unknown, or mapped, so is the primal output
# then; and what is refused is not this, but what JAX makes of it at the end:
# linearization by a jvp and its partial evaluation, or `jax.jacfwd`.

# The branches that branches are the jvp of.
_primal_branches: weakref.WeakKeyDictionary[core.Jaxpr, Any] = (
    weakref.WeakKeyDictionary())


def record_jvp(branches: Sequence, branches_jvp: Sequence) -> None:
  """Remembers what some branches are the jvp of."""
  if not enabled:
    return
  for branch, branch_jvp in zip(branches, branches_jvp):
    # A copy, since JAX keeps the jvp of a jaxpr for as long as this lives.
    _primal_branches[internals.open_jaxpr(branch_jvp)] = internals.map_jaxpr(
        lambda j: j.replace(), branch)


def spares_primals(original: Callable, outputs_at: int) -> Callable:
  """Makes one of JAX's transformations of a jaxpr know a jvp's primals.

  Where a primal output of the jvp of a branch is transformed, and would not be
  if it were computed apart, it is computed by the branch itself, and by the jvp
  once more with the tangent.

  Args:
    original: JAX's transformation, a function of a jaxpr.
    outputs_at: where, in what it returns, stands which outputs are transformed.

  Returns:
    A function of the same signature.
  """
  def sparing(jaxpr, *args, **kwargs):
    result = original(jaxpr, *args, **kwargs)
    primal = _primal_branches.get(internals.open_jaxpr(jaxpr))
    if primal is None or primal.effects:
      return result
    num_transformed = lambda result: sum(
        result[outputs_at][:len(primal.out_avals)])
    # Of all these functions, the first list says what of the inputs is.
    inputs = next(x for x in (*args, *kwargs.values())
                  if isinstance(x, (list, tuple)))
    if num_transformed(result) <= _num_dependent(primal, inputs):
      return result
    split = original(_with_primals_of(primal, jaxpr), *args, **kwargs)
    return min(result, split, key=num_transformed)

  return sparing


def _num_dependent(closed_jaxpr, changed: Sequence[bool]) -> int:
  """How many outputs depend on a changed input."""
  jaxpr = internals.open_jaxpr(closed_jaxpr)
  changed_inputs = {v for v, c in zip(jaxpr.invars, changed) if c}
  inputs_of = _inputs_by_variable(jaxpr)
  return sum(not changed_inputs.isdisjoint(inputs_of.get(x, ()))
             for x in jaxpr.outvars if isinstance(x, core.Var))


def _with_primals_of(primal, jvp):
  """A jvp whose primal outputs are computed by the branch itself."""
  jvp_jaxpr, jaxpr = internals.open_jaxpr(jvp), internals.open_jaxpr(primal)
  new_var = core.gensym()
  env: dict[core.Var, core.Atom] = dict(zip(jaxpr.invars, jvp_jaxpr.invars))
  env.update((v, core.Literal(c, v.aval))
             for v, c in zip(jaxpr.constvars, primal.consts))
  read = lambda x: env[x] if isinstance(x, core.Var) else x
  eqns = []
  for eqn in jaxpr.eqns:
    outvars = [v if isinstance(v, core.DropVar) else new_var(v.aval)
               for v in eqn.outvars]
    eqns.append(eqn.replace(invars=list(map(read, eqn.invars)),
                            outvars=outvars))
    env.update(zip(eqn.outvars, outvars))
  outvars = [*map(read, jaxpr.outvars),
             *jvp_jaxpr.outvars[len(jaxpr.outvars):]]
  return internals.map_jaxpr(lambda j: j.replace(
      eqns=[*eqns, *j.eqns], outvars=outvars, debug_info=j.debug_info), jvp)
