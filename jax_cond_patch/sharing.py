"""Lets equal branches be one jaxpr, and transforms each jaxpr once.

A model of many layers has the same branches in each of them, traced anew. JAX's
own caches are by the identity of a jaxpr, so each would be transformed, joined
and resolved anew, too.

Branches that differ in constants alone are a family. What is made of two of
them differs in these constants; of the others it is made by replacing them.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
import dataclasses
from typing import Any
import weakref

import jax
from jax import lax
from jax._src import core
import jax.numpy as jnp
import numpy as np

from jax_cond_patch.compat import internals


class _NotShared(Exception):
  """There are arrays or functions in a jaxpr."""


class _First:
  """The first jaxpr of a structure, and what stands for it in other ones."""

  def __init__(self):
    self.jaxpr = None
    self.token = object()


class _Family:
  """Stands for all jaxprs that differ in the values of constants alone."""


@internals.cache(max_size=512)
def _family_of(structure: Hashable) -> _Family:
  del structure
  return _Family()


@internals.cache(max_size=512)
def _first_of(family: _Family, values: tuple[bytes, ...]) -> _First:
  del family, values
  return _First()


def shared(jaxpr):
  """Returns the first jaxpr that was equal to this one, or this one.

  Equal are jaxprs that differ in nothing but the identity of their variables:
  also their equations come from the same lines, called from the same lines. One
  that holds arrays or closures is not shared, for it would be kept alive.
  """
  return _identify(jaxpr).other or jaxpr


@dataclasses.dataclass(frozen=True)
class _Identity:
  """What a jaxpr is the same as.

  Attributes:
    other: the first jaxpr that is equal, if it is another one.
    token: stands for all equal ones; None if the jaxpr is not shared.
    family: its family, or None.
    constants: the constants in which it may differ from others of its family.
  """
  other: Any = None
  token: object = None
  family: _Family | None = None
  constants: tuple[core.Literal, ...] = ()


@internals.weakref_lru_cache_of_all_contexts
def _identify(jaxpr) -> _Identity:
  try:
    family, constants, is_general = (
        _known_families.pop(jaxpr, None) or _find_family(jaxpr))
  except (_NotShared, TypeError):  # Something in it may not be hashable.
    return _Identity()
  first = _first_of(family, tuple(map(_bytes, constants)))
  first.jaxpr = first.jaxpr or jaxpr
  # The caches must not hold on to their own keys.
  return _Identity(None if first.jaxpr is jaxpr else first.jaxpr, first.token,
                   family if is_general else None, constants)


# Those of jaxprs that were made by replacing constants.
_known_families: weakref.WeakKeyDictionary[Any, tuple] = (
    weakref.WeakKeyDictionary())


def _find_family(jaxpr) -> tuple[_Family, tuple[core.Literal, ...], bool]:
  """Its family and constants, and whether it may be made of another one's."""
  structure, constants = _structure(jaxpr)
  is_general = bool(constants) and _is_plain(jaxpr)
  return _family_of(structure), constants, is_general


def _is_plain(jaxpr) -> bool:
  """Whether each operation is one of `jax.lax`, or jitted ones.

  Of another one, `deferral.spares_primals` may have something to say.
  """
  return all(
      (eqn.primitive in internals.lax_primitives() and not eqn.effects) or
      (eqn.primitive is internals.jit_p and
       all(map(_is_plain, internals.jaxprs_in_params(eqn.params))))
      for eqn in internals.open_jaxpr(jaxpr).eqns)


# Their rules do not look at the values of operands, and compute with them only
# in the jaxprs that they make.
_WITH_CONSTANTS = frozenset([
    lax.add_p, lax.broadcast_in_dim_p, lax.div_p, lax.eq_p, lax.ge_p, lax.gt_p,
    lax.le_p, lax.lt_p, lax.max_p, lax.min_p, lax.mul_p, lax.ne_p, lax.neg_p,
    lax.sub_p, internals.jit_p])

_FLOATS = frozenset(map(np.dtype, (
    jnp.bfloat16, np.float16, np.float32, np.float64)))


def _is_constant(atom) -> bool:
  return isinstance(atom, core.Literal) and atom.aval.dtype in _FLOATS


def _bytes(literal: core.Literal) -> bytes:
  return np.asarray(literal.val).tobytes()


def _structure(jaxpr) -> tuple[Hashable, tuple[core.Literal, ...]]:
  """Returns a key of all but the values of constants, and these."""
  if getattr(jaxpr, "consts", ()):
    raise _NotShared
  opened = internals.open_jaxpr(jaxpr)
  numbers: dict[core.Var, int] = {}
  constants: list[core.Literal] = []

  def bound(var):
    return numbers.setdefault(var, len(numbers)), var.aval

  def read(atom):
    if isinstance(atom, core.Literal):
      return atom.aval, _bytes(atom)
    return numbers[atom]

  def read_operand(atom):
    if not _is_constant(atom):
      return read(atom)
    constants.append(atom)
    return atom.aval, type(atom.val)

  binders = tuple(map(bound, (*opened.constvars, *opened.invars)))
  eqns = tuple(
      (eqn.primitive, tuple(map(
          read_operand if eqn.primitive in _WITH_CONSTANTS else read,
          eqn.invars)), _params(eqn),
       frozenset(eqn.effects), _param(internals.context_key(eqn)),
       eqn.source_info.name_stack, eqn.source_info.traceback,
       tuple(map(bound, eqn.outvars))) for eqn in opened.eqns)
  return (type(jaxpr), len(opened.invars), binders, eqns,
          tuple(map(read, opened.outvars)), frozenset(opened.effects),
          _param(opened.debug_info)), tuple(constants)


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
    if eqn.primitive is not internals.jit_p or jaxpr.consts:
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
    token = _identify(x).token
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


def once(jaxpr, key: Hashable, make: Callable[[Any], Any]):
  """Returns what a function makes of a jaxpr; it is called once.

  Args:
    jaxpr: the jaxpr. It is not kept alive.
    key: what else the result depends on.
    make: makes the result of a jaxpr, in which that itself must not be.

  Returns:
    The result.
  """
  key = internals.trace_context(), key
  try:
    hash(key)
  except TypeError:
    return make(jaxpr)
  results = _results.setdefault(jaxpr, {})
  if key not in results:
    identity = _identify(jaxpr)
    if identity.family is None:
      results[key] = make(jaxpr)
    else:
      made = _results.setdefault(identity.family, {}).setdefault(key, _Made())
      results[key] = made.of(jaxpr, identity.constants, make)
  return results[key]


class _Made:
  """What is made of the jaxprs of a family, each with constants of its own."""

  def __init__(self):
    self._first = None
    self._general = None
    # It costs time to compare what can't be made of other constants.
    self._num_trials = 8

  def of(self, jaxpr, constants: tuple[core.Literal, ...],
         make: Callable[[Any], Any]):
    """Returns what is made of a jaxpr."""
    general = self._general
    if general is not None:
      try:
        return general(constants)
      except _NotShared:
        pass
    result = make(jaxpr)
    if self._first is None:
      self._first = constants, result
    elif self._num_trials:
      self._num_trials -= 1
      try:
        self._general = _General(self._first, (constants, result))
      except Exception:  # Anything may be in what was made, and be compared.
        pass
    return result


class _General:
  """What is made of any jaxpr of a family, by what was made of two.

  Constants that are equal in both have to be so in the others, and those that
  differ alike have to be alike there: what is made does not tell them apart.
  """

  def __init__(self, first, second):
    self._constants, result = first
    other_constants, other_result = second
    self._pairs = list(map(_pair, self._constants, other_constants))
    self._replace = _replacement(result, other_result, set(self._pairs))

  def __call__(self, constants: tuple[core.Literal, ...]):
    new: dict[Hashable, core.Literal] = {}
    for old, pair, constant in zip(self._constants, self._pairs, constants):
      *_, value, other_value = pair
      same = old if value == other_value else new.setdefault(pair, constant)
      if same is not constant and _bytes(same) != _bytes(constant):
        raise _NotShared
    return self._replace(new)


def _pair(literal: core.Literal, other: core.Literal) -> tuple:
  return literal.aval, type(literal.val), _bytes(literal), _bytes(other)


def _replacement(made, other, pairs) -> Callable[[dict[Hashable, Any]], Any]:
  """Returns a function that replaces the constants in what was made.

  Args:
    made: what was made of one jaxpr.
    other: what was made of another one of its family.
    pairs: in what the constants of the two differ.

  Returns:
    A function of the constants by their pair.

  Raises:
    _NotShared: they do not only differ in these constants.
  """
  if type(made) is not type(other):
    raise _NotShared
  if type(made) in (tuple, list):
    if len(made) != len(other):
      raise _NotShared
    parts = [_replacement(x, y, pairs) for x, y in zip(made, other)]
    return lambda new: type(made)([part(new) for part in parts])
  if not internals.is_jaxpr(made):
    if made is not other and not made == other:
      raise _NotShared
    return lambda new: made

  family, constants, is_general = _find_family(made)
  other_family, other_constants, _ = _find_family(other)
  if family is not other_family:
    raise _NotShared
  places = [
      (number, *place, _pair(x, y)) for number, (place, x, y) in enumerate(
          zip(_places_of_constants(made), constants, other_constants))
      if _bytes(x) != _bytes(y)]
  if not pairs.issuperset(pair for *_, pair in places):
    raise _NotShared
  if not places:
    return lambda new: made

  def with_constants(new):
    new_constants = list(constants)

    def replace(jaxpr):
      eqns = list(jaxpr.eqns)
      for number, i, k, pair in places:
        invars = list(eqns[i].invars)
        invars[k] = new_constants[number] = new[pair]
        eqns[i] = eqns[i].replace(invars=invars)
      return jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)

    jaxpr = internals.map_jaxpr(replace, made)
    _known_families[jaxpr] = family, tuple(new_constants), is_general
    return jaxpr

  return with_constants


def _places_of_constants(jaxpr) -> Iterator[tuple[int, int]]:
  """Where constants stand: the number of the equation, and of its operand."""
  for i, eqn in enumerate(internals.open_jaxpr(jaxpr).eqns):
    if eqn.primitive in _WITH_CONSTANTS:
      for k, atom in enumerate(eqn.invars):
        if _is_constant(atom):
          yield i, k


def forget() -> None:
  """Forgets all results."""
  _results.clear()
  _known_families.clear()


def frozen(x) -> Hashable:
  """Makes a key of arguments."""
  if isinstance(x, (tuple, list)):
    return tuple(map(frozen, x))
  return x
