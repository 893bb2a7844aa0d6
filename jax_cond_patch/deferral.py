"""Equations that stand for an error, and raise it when they are lowered.

A program may hold code that cannot be lowered or transformed for some
platforms and is not reached on others. Whether it is reached is known when it
is lowered, so the error waits until then.
"""
from __future__ import annotations

from typing import Any

from jax._src import core


class DeferredError:
  """An error to raise when an equation is lowered.

  Attributes:
    type: the class of the exception.
    message: its text.
  """
  __slots__ = ("type", "message")

  def __init__(self, type_: type[Exception], message: str):
    self.type = type_
    self.message = message

  def __repr__(self) -> str:
    return f"{self.type.__name__}({self.message!r})"


deferred_error_p = core.Primitive("deferred_error")
deferred_error_p.multiple_results = True


@deferred_error_p.def_abstract_eval
def _deferred_error_abstract_eval(*_, error, out_avals):
  del error
  return list(out_avals)


def deferred_error_lowering(ctx, *_, error: DeferredError, out_avals: Any):
  del ctx, out_avals
  raise error.type(error.message)


def deferred_error_eqn(eqn: core.JaxprEqn, error: DeferredError
                       ) -> core.JaxprEqn:
  """Returns an equation with the outputs of `eqn` that raises when lowered."""
  params = dict(error=error, out_avals=tuple(v.aval for v in eqn.outvars))
  return eqn.replace(invars=[], primitive=deferred_error_p, params=params)
