"""Scalars of a program that are known before it is lowered.

The index of a conditional may be known: a flag of the Python program, or one
that differs by platform only. Followed is what makes an index out of a flag:
literals, closed-over scalars and the platform index, through conversions,
comparisons, boolean operations, `clamp` and `select_n`, and into and out of
calls, conditionals and loops. Arithmetic is not.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any
import weakref

import jax
from jax._src import core
import numpy as np

from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals

Platform = platforms_lib.Platform

# The value of each element of an array of integers or booleans: all have the
# same one. None if it is not known.
Value = Any

# Calls, the inputs and outputs of which are those of their one jaxpr.
CALLS = frozenset([
    "call", "checkpoint", "closed_call", "compute_on", "core_call",
    "core_closed_call",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
    "eval_jaxpr", "jit", "named_call", "pjit", "remat", "remat2", "remat_call",
    "shard_map", "xla_call"])

# Operations that give each element of the output one of the input's.
_COPIES = frozenset([
    "broadcast_in_dim", "copy", "dynamic_slice", "pbroadcast", "pvary",
    "reshape", "slice", "squeeze", "transpose"])

_ELEMENTWISE: dict[str, Callable] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "max": np.maximum, "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high)}

# One such operand decides.
_DECISIVE = {"and": False, "or": True}

# How long the chains of equations are that are followed.
_MAX_DEPTH = 50


def taken(branches: Sequence, index: Value) -> int:
  """The branch that a conditional takes, its index clamped as JAX does it."""
  return min(max(int(index), 0), len(branches) - 1)


def operands(eqn: core.JaxprEqn
             ) -> list[tuple[Any, Sequence[core.Atom | None]]]:
  """The jaxprs of an equation, and what their inputs are outside.

  Args:
    eqn: an equation.

  Returns:
    A list of jaxprs, each with an atom for each of its inputs. It is None for
    what a loop changes. The list is empty for primitives that are not followed.
  """
  params, invars = eqn.params, eqn.invars
  if eqn.primitive is internals.cond_p:
    return [(branch, invars[1:]) for branch in params["branches"]]
  if eqn.primitive.name in ("scan", "while"):
    consts, carry = internals.loop_arity(eqn)
    if eqn.primitive.name == "scan":
      body = params["jaxpr"]
      return [(body, _unchanged(body, invars, consts, carry))]
    cond_invars, body_invars = (invars[:params["cond_nconsts"]],
                                invars[params["cond_nconsts"]:])
    body = params["body_jaxpr"]
    inputs = _unchanged(body, body_invars, consts, carry)
    return [(params["cond_jaxpr"], [*cond_invars, *inputs[consts:]]),
            (body, inputs)]
  if eqn.primitive.name in CALLS:
    return [(jaxpr, invars) for jaxpr in params.values()
            if internals.is_jaxpr(jaxpr) and
            len(internals.open_jaxpr(jaxpr).invars) == len(invars)]
  return []


def _unchanged(body, invars: Sequence[core.Atom], consts: int, carry: int
               ) -> list[core.Atom | None]:
  """The inputs of a loop, without the carry that its body changes."""
  body = internals.open_jaxpr(body)
  inputs: list[core.Atom | None] = list(invars)
  for i in range(consts, consts + carry):
    if body.outvars[i - consts] is not body.invars[i]:
      inputs[i] = None
  return inputs


def _scalar(x, aval) -> Value:
  """The value of a constant of one element."""
  if (not _is_integer(aval) or math.prod(aval.shape) != 1 or
      isinstance(x, core.Tracer)):
    return None
  if isinstance(x, jax.Array) and (
      x.is_deleted() or not x.is_fully_addressable):
    return None
  return np.asarray(x, aval.dtype).reshape(())[()]


def _is_integer(aval) -> bool:
  return (isinstance(aval, core.ShapedArray) and
          isinstance(aval.dtype, np.dtype) and aval.dtype.kind in "biu")


@internals.weakref_lru_cache_of_all_contexts
def _definitions(jaxpr: core.Jaxpr) -> dict[core.Var, core.JaxprEqn]:
  return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


class Values:
  """What is known of the variables of a jaxpr, on one lowering platform.

  Every variable that a value may depend on is looked at, also where that value
  is not known. So `given` sees all the inputs that may matter.
  """

  def __init__(self, platform: Platform | None, definition_of: Callable,
               given: Callable[[core.Var], Value], depth=None):
    """Initializes `Values`.

    Args:
      platform: the name of a lowering platform, None if it is not known.
      definition_of: returns the equation that defines a variable, or None.
      given: returns the value of a variable that none defines.
      depth: how many equations are being followed, a list of one number.
    """
    self._platform = platform
    self._definition_of = definition_of
    self._given = given
    self._depth = [0] if depth is None else depth
    self._values: dict[core.Var, Value] = {}
    self._called: dict[tuple[int, int], Values] = {}

  @classmethod
  def of_jaxpr(cls, jaxpr, platform: Platform | None, input_at: Callable,
               definition_of: Callable | None = None, depth=None) -> Values:
    """The values in a jaxpr; `input_at` gives that of the input at a position.
    """
    opened = internals.open_jaxpr(jaxpr)
    inputs = {v: i for i, v in enumerate(opened.invars)}
    consts = dict(zip(opened.constvars, getattr(jaxpr, "consts", ())))

    def given(var):
      if var in inputs:
        return input_at(inputs[var])
      return _scalar(consts[var], var.aval) if var in consts else None

    if definition_of is None:
      definition_of = _definitions(opened).get
    return cls(platform, definition_of, given, depth)

  def __call__(self, atom: core.Atom | None) -> Value:
    if atom is None or not _is_integer(atom.aval):
      return None
    if isinstance(atom, core.Literal):
      return _scalar(atom.val, atom.aval)
    if atom not in self._values:
      self._values[atom] = None
      if self._depth[0] < _MAX_DEPTH:
        self._depth[0] += 1
        self._values[atom] = self._variable(atom)
        self._depth[0] -= 1
    return self._values[atom]

  def _variable(self, var: core.Var) -> Value:
    eqn = self._definition_of(var)
    if eqn is None:
      return self._given(var)
    if eqn.primitive is internals.platform_index_p:
      return self._owner(eqn, internals.indexed_platforms(eqn.params))
    if called := operands(eqn):
      return self._output(eqn, called, eqn.outvars.index(var))
    name = eqn.primitive.name
    if name in _COPIES:
      return self(eqn.invars[0])
    if name == "optimization_barrier":
      return self(eqn.invars[eqn.outvars.index(var)])
    if name == "convert_element_type":
      x = self(eqn.invars[0])
      return None if x is None else x.astype(var.aval.dtype)
    if name == "select_n":
      which, *cases = map(self, eqn.invars)
      return None if which is None else cases[int(which)]
    if name in _ELEMENTWISE:
      may_decide = name in _DECISIVE and var.aval.dtype == np.bool_
      if not may_decide and None in [
          self(x) for x in eqn.invars if isinstance(x, core.Var)]:
        return None  # Literals take longer.
      xs = [self(x) for x in eqn.invars]
      if all(x is not None for x in xs):
        return _ELEMENTWISE[name](*xs)
      if may_decide:
        decisive = np.bool_(_DECISIVE[name])
        return decisive if any(
            x is not None and x == decisive for x in xs) else None
    return None

  def _owner(self, eqn: core.JaxprEqn, branches_platforms) -> Value:
    """The branch of a platform conditional, or the value of its index."""
    platform = self._platform_of(eqn)
    branch = platform and platforms_lib.owner(branches_platforms, platform)
    return None if branch is None else np.int32(branch)

  def _platform_of(self, eqn: core.JaxprEqn) -> Platform | None:
    names = internals.platforms_for_eqn_ctx(getattr(eqn, "ctx", None))
    return names[0] if names else self._platform

  def _output(self, eqn: core.JaxprEqn, called: Sequence, position: int
              ) -> Value:
    """The value of an output of an equation with jaxprs."""
    if eqn.primitive.name in ("scan", "while"):
      _, inputs = called[-1]
      consts, carry = internals.loop_arity(eqn)
      if position < carry:
        return self(inputs[consts + position])
    elif eqn.primitive is internals.cond_p:
      branches_platforms = eqn.params.get(internals.PLATFORMS)
      index = (self(eqn.invars[0]) if branches_platforms is None else
               self._owner(eqn, branches_platforms))
      if index is not None:
        called = [called[taken(eqn.params["branches"], index)]]
    first, *others = (
        self._inside(eqn, jaxpr, inputs)(
            internals.open_jaxpr(jaxpr).outvars[position])
        for jaxpr, inputs in called)
    return first if all(x is not None and x == first for x in others) else None

  def _inside(self, eqn: core.JaxprEqn, jaxpr, inputs: Sequence) -> Values:
    key = (id(eqn), id(jaxpr))
    if key not in self._called:
      # These have what is inside: a cycle would hold the program's arrays.
      outside = weakref.proxy(self)
      self._called[key] = Values.of_jaxpr(
          jaxpr, self._platform_of(eqn), lambda i: outside(inputs[i]),
          depth=self._depth)
    return self._called[key]


def known_to_trace(index) -> Value:
  """What is known of an index that the rule of a transformation is given.

  An array is not a constant: this is one run of a program that is not staged.
  """
  if isinstance(index, jax.Array) and internals.is_concrete(index):
    return None
  if internals.is_concrete(index):
    return _scalar(index, core.ShapedArray((), np.dtype(np.int32)))
  atom, definitions, constant = internals.staged(index)
  def given(var):
    value = constant(var)
    return None if value is None else _scalar(value, var.aval)
  return Values(None, definitions.get, given)(atom)
