"""Derivatives of what runs while it is differentiated.

Outside of `jax.jit`, `jax.vjp` of a jitted function or of a loop runs it at
once, and keeps what its derivative reads: outputs of a module, with the shapes
that tracing gave them. So those of branches that do not run would be kept as
zeros. But here the platform is known before: its branches are the only ones.
"""
from __future__ import annotations

from collections.abc import Callable

from jax_cond_patch import resolution
from jax_cond_patch.compat import internals


def linearize(rule: Callable) -> Callable:
  """For a rule in `ad.primitive_linearizations`."""
  def linearize_rule(*args, **params):
    _, primals = internals.linearization_inputs(args)
    return rule(*args, **_resolved(primals, params))

  return linearize_rule


def partial_eval(rule: Callable) -> Callable:
  """For a rule in `pe.custom_partial_eval_rules`."""
  def partial_eval_rule(trace, *tracers, **params):
    known = [t.pval.get_known() for t in tracers if t.is_known()]
    return rule(trace, *tracers, **_resolved(known, params))

  return partial_eval_rule


def _resolved(values, params):
  """Resolves the jaxprs in params for the platform that they run on.

  Args:
    values: the inputs that are known.
    params: the params of an equation.

  Returns:
    The new params; `params` itself where nothing runs yet.
  """
  if not any(resolution.is_resolvable(jaxpr, resolution.Scope.PROGRAM)
             for jaxpr in internals.jaxprs_in_params(params)):
    return params
  platform = internals.running_platform(values, params)
  if platform is None:
    return params
  resolved = resolution.map_params(params, lambda jaxpr: resolution.resolve(
      jaxpr, (platform,), resolution.Scope.PROGRAM))
  # The branches of a conditional have the same effects.
  if len({frozenset(jaxpr.effects) for jaxpr in resolved.get(
      "branches", ())}) > 1:
    return params
  return resolved
