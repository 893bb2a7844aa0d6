"""Lets equal branches be one jaxpr, and transforms each jaxpr once.

A model of many layers has the same branches in each of them, traced anew. JAX's
own caches are by the identity of a jaxpr, so each would be transformed, joined
and resolved anew, too.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
import weakref

import jax
from jax._src import core
import numpy as np

from jax_cond_patch.compat import internals


class _NotShared(Exception):
  """There are arrays or functions in a jaxpr."""


class _First:
  """The first jaxpr of a structure, and what stands for it in other ones."""

  def __init__(self):
    self.jaxpr = None
    self.token = object()


@internals.cache(max_size=512)
def _first_of(structure: Hashable) -> _First:
  del structure
  return _First()


def shared(jaxpr):
  """Returns the first jaxpr that was equal to this one, or this one.

  Equal are jaxprs that differ in nothing but the identity of their variables:
  also their equations come from the same lines, called from the same lines. One
  that holds arrays or closures is not shared, for it would be kept alive.
  """
  other, _ = _other_and_token(jaxpr)
  return other or jaxpr


@internals.weakref_lru_cache_of_all_contexts
def _other_and_token(jaxpr):
  """The first jaxpr that is equal, if it is another one, and its token.

  The cache must not hold on to its own key. The token is None if the jaxpr is
  not shared.
  """
  try:
    first = _first_of(_structure(jaxpr))
  except (_NotShared, TypeError):  # Something in it may not be hashable.
    return None, None
  first.jaxpr = first.jaxpr or jaxpr
  return None if first.jaxpr is jaxpr else first.jaxpr, first.token


def _structure(jaxpr) -> Hashable:
  if getattr(jaxpr, "consts", ()):
    raise _NotShared
  opened = internals.open_jaxpr(jaxpr)
  numbers: dict[core.Var, int] = {}

  def bound(var):
    return numbers.setdefault(var, len(numbers)), var.aval

  def read(atom):
    if isinstance(atom, core.Literal):
      return atom.aval, np.asarray(atom.val).tobytes()
    return numbers[atom]

  binders = tuple(map(bound, (*opened.constvars, *opened.invars)))
  eqns = tuple(
      (eqn.primitive, tuple(map(read, eqn.invars)), _params(eqn),
       frozenset(eqn.effects), _param(internals.context_key(eqn)),
       eqn.source_info.name_stack, eqn.source_info.traceback,
       tuple(map(bound, eqn.outvars))) for eqn in opened.eqns)
  return (type(jaxpr), len(opened.invars), binders, eqns,
          tuple(map(read, opened.outvars)), frozenset(opened.effects),
          _param(opened.debug_info))


class _Same:
  """Equal to itself only."""
  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __hash__(self):
    return id(self.value)

  def __eq__(self, other):
    return isinstance(other, _Same) and self.value is other.value


def _params(eqn: core.JaxprEqn) -> Hashable:
  try:
    return _param(eqn.params)
  except _NotShared:
    # A jitted function may hold functions, of `jax.custom_jvp`. It is one jaxpr
    # wherever it is called, and holds no values of the program that calls it.
    jaxpr = eqn.params.get("jaxpr")
    if eqn.primitive.name not in ("jit", "pjit") or jaxpr.consts:
      raise
    return _Same(jaxpr), _param({**eqn.params, "jaxpr": None})


# Of most params. They are told apart by type: 1 == True.
_PLAIN = frozenset([bool, int, str, type(None)])


def _param(x) -> Hashable:
  """Makes a key of a param that no `==` of the user's and no 0 == -0 is in."""
  if type(x) in _PLAIN:
    return type(x), x
  if isinstance(x, dict):
    return tuple((name, _param(value)) for name, value in x.items())
  if isinstance(x, (tuple, list)):
    return type(x), *map(_param, x)
  if internals.is_jaxpr(x):
    # Not its structure, which would be made anew for each jaxpr around it.
    _, token = _other_and_token(x)
    if token is None:
      raise _NotShared
    return token
  # A mesh decorates functions.
  if callable(x) and not isinstance(x, (type, jax.sharding.Mesh)):
    raise _NotShared
  if isinstance(x, (float, complex)):
    return type(x), repr(x)
  if isinstance(x, np.generic):
    return type(x), x.tobytes()
  return type(x), x


# The last closed jaxpr that was made of a jaxpr.
_closed: weakref.WeakKeyDictionary[core.Jaxpr, weakref.ref] = (
    weakref.WeakKeyDictionary())


def closed(jaxpr):
  """Returns one closed jaxpr for all that close the same jaxpr."""
  if isinstance(jaxpr, core.Jaxpr):
    return jaxpr
  last = _closed.get(jaxpr.jaxpr, lambda: None)()
  if last is not None and not last.consts and not jaxpr.consts:
    return last
  _closed[jaxpr.jaxpr] = weakref.ref(jaxpr)
  return jaxpr


# A dict of Python's, since threads may be here while another one forgets all:
# JAX's own caches by weak references do not survive that if a key has an
# `__eq__` written in Python, up to JAX 0.6.0 at least.
_results: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def once(jaxpr, key: Hashable, make: Callable[[], Any]):
  """Returns what a function makes of a jaxpr; it is called once.

  Args:
    jaxpr: the jaxpr. It is not kept alive.
    key: what else the result depends on.
    make: makes the result, in which the jaxpr itself must not be.

  Returns:
    The result.
  """
  key = internals.trace_context(), key
  try:
    hash(key)
  except TypeError:
    return make()
  results = _results.setdefault(jaxpr, {})
  if key not in results:
    results[key] = make()
  return results[key]


def forget() -> None:
  """Forgets all results."""
  _results.clear()


def frozen(x) -> Hashable:
  """Makes a key of arguments."""
  if isinstance(x, (tuple, list)):
    return tuple(map(frozen, x))
  return x
