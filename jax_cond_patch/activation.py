"""Puts the replacements into JAX and takes them out again.

`table` is the one list of what is replaced; activation, deactivation, status,
the documentation and the tests all read it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from typing import Any
import warnings

from jax_cond_patch.compat import releases
from jax_cond_patch.errors import JaxCondPatchError
from jax_cond_patch.errors import UnsupportedJaxVersionError
from jax_cond_patch.errors import UnsupportedJaxVersionWarning

_logger = logging.getLogger("jax_cond_patch")

_ABSENT = object()


class Place:
  """Where something of JAX stands: `get`, `set` and `remove` it."""

  def get(self):
    """Returns what stands there, or `_ABSENT`."""
    raise NotImplementedError

  def set(self, value) -> None:
    raise NotImplementedError

  def remove(self) -> None:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Attribute(Place):
  """An attribute of a module, class or function."""
  holder: Any
  name: str

  def get(self):
    return getattr(self.holder, self.name, _ABSENT)

  def set(self, value):
    setattr(self.holder, self.name, value)

  def remove(self):
    delattr(self.holder, self.name)


@dataclasses.dataclass(frozen=True)
class Item(Place):
  """The entry of a table of rules."""
  table: Any
  key: Any

  def get(self):
    return self.table.get(self.key, _ABSENT)

  def set(self, value):
    self.table[self.key] = value

  def remove(self):
    del self.table[self.key]


@dataclasses.dataclass(frozen=True)
class Member(Place):
  """The membership in a set; its value is the element."""
  elements: set
  element: Any

  def get(self):
    return self.element if self.element in self.elements else _ABSENT

  def set(self, value):
    self.elements.add(value)

  def remove(self):
    self.elements.remove(self.element)


@dataclasses.dataclass(frozen=True)
class Replacement:
  """One thing in JAX that is replaced.

  Attributes:
    name: what it is, as a reader finds it in JAX.
    place: where it stands.
    make: makes the replacement from the original; or, where there is none in
      JAX, from nothing.
    why: what the replacement is for.
    is_addition: whether JAX has nothing there.
  """
  name: str
  place: Place
  make: Callable[..., Any]
  why: str
  is_addition: bool = False


def table() -> Sequence[Replacement]:
  """Lists what is replaced in the installed JAX, in order."""
  return _table()


@functools.cache
def _table() -> Sequence[Replacement]:
  from jax._src import checkify
  from jax._src import core
  from jax._src.interpreters import ad
  from jax._src.interpreters import batching
  from jax._src.interpreters import mlir
  from jax._src.interpreters import partial_eval as pe
  from jax._src.interpreters import pxla
  from jax._src.lax.control_flow import conditionals
  from jax._src.state import discharge
  from jax_cond_patch import deferral
  from jax_cond_patch import lowering
  from jax_cond_patch import resolution
  from jax_cond_patch import rules
  from jax_cond_patch.compat import internals

  cond_p = internals.cond_p
  made = []

  def replace(name, place, make, why):
    made.append(Replacement(name, place, make, why))

  def add(name, place, value, why):
    made.append(Replacement(name, place, lambda: value, why, is_addition=True))

  def replace_rule(table_name, rules_table, make, why):
    replace(f"{table_name}[cond_p]", Item(rules_table, cond_p), make, why)

  replace("lax.platform_dependent.__code__",
          Attribute(conditionals.platform_dependent, "__code__"),
          lambda _: rules.platform_dependent_code.__code__,
          "stages a conditional with platforms, branches told by identity")

  index_why = "the platform index is not passed on, but made again"
  add("pe.partial_eval_jaxpr_custom_rules[platform_index_p]",
      Item(pe.partial_eval_jaxpr_custom_rules, internals.platform_index_p),
      rules.platform_index_partial_eval_custom, index_why)
  why = "keeps platforms, passes over each branch once, defers errors"
  replace_rule("pe.custom_partial_eval_rules", pe.custom_partial_eval_rules,
               rules.partial_eval, f"{why}; {index_why}")
  replace_rule("pe.partial_eval_jaxpr_custom_rules",
               pe.partial_eval_jaxpr_custom_rules, rules.partial_eval_custom,
               why)
  replace_rule("ad.primitive_jvps", ad.primitive_jvps, rules.jvp, why)
  if cond_p in getattr(ad, "primitive_linearizations", ()):
    replace_rule("ad.primitive_linearizations", ad.primitive_linearizations,
                 rules.linearize, f"{why}; {index_why}")
  if cond_p in ad.primitive_transposes:
    replace_rule("ad.primitive_transposes", ad.primitive_transposes,
                 rules.transpose, f"{why}; {index_why}")
    add("ad.primitive_transposes[platform_index_p]",
        Item(ad.primitive_transposes, internals.platform_index_p),
        rules.platform_index_transpose, index_why)
  if cond_p in getattr(ad, "fancy_transposes", ()):
    replace_rule("ad.fancy_transposes", ad.fancy_transposes,
                 rules.fancy_transpose, why)
  replace_rule("batching.fancy_primitive_batchers",
               batching.fancy_primitive_batchers, rules.batching, why)
  for name in ("_partial_discharge_rules", "_discharge_rules"):
    if cond_p in getattr(discharge, name, ()):
      replace_rule(f"discharge.{name}", getattr(discharge, name),
                   rules.discharge, why)
  replace_rule("checkify.error_checks", checkify.error_checks, rules.checkify,
               why)
  if cond_p in internals.remat_rules():
    replace_rule("remat.rules", internals.remat_rules(), rules.remat, why)
  if not internals.native:
    replace_rule("core.custom_typechecks", core.custom_typechecks,
                 rules.ignores_platforms, "does not know platforms")

  replace("pxla.lower_sharding_computation",
          Attribute(pxla, "lower_sharding_computation"),
          lowering.lower_sharding_computation,
          "lowers only what the lowering platforms reach")
  replace("mlir.jaxpr_subcomp", Attribute(mlir, "jaxpr_subcomp"),
          lowering.jaxpr_subcomp,
          "the same for what is traced while lowering")
  replace("mlir.lower_per_platform", Attribute(mlir, "lower_per_platform"),
          lowering.lower_per_platform,
          "code for some of the platforms knows only these")
  for primitive, rule in (
      (resolution.platform_case_p, lowering.platform_case_lowering),
      (deferral.deferred_error_p, deferral.deferred_error_lowering)):
    add(f"mlir._lowerings[{primitive}]", Item(mlir._lowerings, primitive),
        internals.lowering_rule_entry(rule), "the lowering of our own")
    if (uncacheable := internals.uncacheable_primitives()) is not None:
      add(f"mlir._uncacheable_primitives: {primitive}",
          Member(uncacheable, primitive), primitive,
          "it is lowered in place, not as a function")
  for table_name, rules_table, primitive, own_rule in (
      ("ad.primitive_jvps", ad.primitive_jvps, deferral.deferred_error_p,
       deferral.deferred_error_jvp),
      ("ad.primitive_jvps", ad.primitive_jvps, deferral.undifferentiable_p,
       deferral.undifferentiable_jvp),
      ("ad.primitive_transposes", ad.primitive_transposes,
       deferral.deferred_error_p, deferral.deferred_error_transpose),
      ("batching.fancy_primitive_batchers", batching.fancy_primitive_batchers,
       deferral.deferred_error_p, deferral.deferred_error_batching)):
    add(f"{table_name}[{primitive}]", Item(rules_table, primitive), own_rule,
        "a rule of our own")
  return tuple(made)


_lock = threading.RLock()
# What activation has put in, and what stood there: a stack to undo.
_undo: list[tuple[Replacement, Any, Any]] = []
_reason = "not activated yet"


def is_active() -> bool:
  """Whether the replacements are in JAX."""
  return bool(_undo)


def _check_version() -> releases.Release:
  found = releases.installed()
  release = releases.find(found) if found else None
  if release is None:
    what = f"JAX {found} is installed" if found else "no JAX is installed"
    raise UnsupportedJaxVersionError(
        f"jax_cond_patch cannot patch JAX: {what}, and the supported releases "
        f"are {releases.supported()}. JAX is left as it is. Install one of "
        "these, or a newer jax_cond_patch. See "
        "docs/pages/errors.md#unknown-jax.")
  return release


def activate(defer: bool | None = None) -> None:
  """Patches JAX, if it is not patched.

  Args:
    defer: whether a transformation works past branches that it fails on, whose
      errors come when they are lowered. None for what was chosen before, and at
      first for what the environment variable `JAX_COND_PATCH_DEFER` says, true
      by default. If JAX is patched, another choice than before takes effect.

  Raises:
    UnsupportedJaxVersionError: the installed JAX is unknown.
    JaxCondPatchError: something that is to be replaced is missing, or the
      environment variable has no known value.
  In all cases JAX is as it was.
  """
  global _reason
  with _lock:
    if is_active():
      _choose_deferral(defer)
      return
    _check_version()
    _choose_deferral(defer)
    prepared = _prepare(table())
    undo: list[tuple[Replacement, Any, Any]] = []
    try:
      for replacement, original, new in prepared:
        replacement.place.set(new)
        undo.append((replacement, original, new))
      _clear_caches()
    except BaseException:
      _restore(undo)
      raise
    _undo.extend(undo)
    _hide_own_frames()
    _reason = "activated"
    _logger.info("JAX %s is patched in %d places", releases.installed(),
                 len(_undo))


# Whether errors are deferred; None until something was chosen.
_defer: bool | None = None


def _choose_deferral(defer: bool | None) -> None:
  global _defer
  if defer is None:
    defer = _read_switch(_DEFER_SWITCH) if _defer is None else _defer
  if defer == _defer:
    return
  from jax_cond_patch import deferral
  _defer = deferral.enabled = defer
  if is_active():
    _clear_caches()


def _prepare(replacements: Sequence[Replacement]
             ) -> list[tuple[Replacement, Any, Any]]:
  """Makes every replacement, or raises before any is put in."""
  prepared = []
  for replacement in replacements:
    original = replacement.place.get()
    if replacement.is_addition:
      if original is not _ABSENT:
        raise JaxCondPatchError(
            f"jax_cond_patch adds {replacement.name} to JAX, but this JAX has "
            "one already. JAX is left as it is. Something else may have "
            "patched it; import that after jax_cond_patch, or not at all. See "
            "docs/pages/errors.md#already-in-jax.")
      new = replacement.make()
    else:
      if original is _ABSENT:
        raise JaxCondPatchError(
            f"jax_cond_patch replaces {replacement.name}, which this JAX does "
            "not have. JAX is left as it is. Reinstall JAX, or report the "
            "version that you use. See docs/pages/errors.md#missing-in-jax.")
      new = replacement.make(original)
    prepared.append((replacement, original, new))
  return prepared


def _restore(undo: list[tuple[Replacement, Any, Any]]) -> None:
  while undo:
    replacement, original, _ = undo[-1]
    if original is _ABSENT:
      replacement.place.remove()
    else:
      replacement.place.set(original)
    undo.pop()


def deactivate() -> None:
  """Takes the patch out of JAX, if it is in.

  Raises:
    JaxCondPatchError: something else has been put over a replacement since; it
      would be lost, so nothing is touched.
  """
  global _reason
  with _lock:
    for replacement, _, new in _undo:
      if replacement.place.get() is not new:
        raise JaxCondPatchError(
            f"{replacement.name} was replaced again after jax_cond_patch was "
            "activated. Undo that first; JAX stays patched. See "
            "docs/pages/errors.md#replaced-again.")
    if not _undo:
      return
    _restore(_undo)
    _clear_caches()
    _reason = "deactivated"
    _logger.info("JAX is as it was before it was patched")


def _clear_caches() -> None:
  from jax_cond_patch.compat import internals
  internals.clear_caches()


@functools.cache
def _hide_own_frames() -> None:
  from jax_cond_patch.compat import internals
  internals.hide_frames(os.path.dirname(os.path.abspath(__file__)) + os.sep)


@contextlib.contextmanager
def activated() -> Iterator[None]:
  """A context in which JAX is patched; afterwards it is as before."""
  with _switched(activate, deactivate):
    yield


@contextlib.contextmanager
def deactivated() -> Iterator[None]:
  """A context in which JAX is not patched; afterwards it is as before."""
  with _switched(deactivate, activate):
    yield


@contextlib.contextmanager
def _switched(switch: Callable, switch_back: Callable) -> Iterator[None]:
  with _lock:
    was_active = is_active()
    switch()
    changed = is_active() != was_active
  try:
    yield
  finally:
    if changed:
      switch_back()


@dataclasses.dataclass(frozen=True)
class Status:
  """What is patched.

  Attributes:
    active: whether JAX is patched.
    reason: why it is, or is not.
    jax_version: the installed JAX, or None.
    era: "added" or "native", or None for an unknown JAX.
    replaced: the names of what is replaced now.
    defers: whether the errors of branches that are not reached are deferred.
  """
  active: bool
  reason: str
  jax_version: str | None
  era: releases.Era | None
  replaced: tuple[str, ...]
  defers: bool


def status() -> Status:
  """Says whether JAX is patched, why, and what is replaced."""
  with _lock:
    found = releases.installed()
    release = releases.find(found) if found else None
    return Status(
        active=is_active(), reason=_reason, jax_version=found,
        era=release and release.era,
        replaced=tuple(replacement.name for replacement, _, _ in _undo),
        defers=is_active() and bool(_defer))


_SWITCH = "JAX_COND_PATCH"
_DEFER_SWITCH = "JAX_COND_PATCH_DEFER"
_SWITCH_VALUES = {"1": True, "true": True, "0": False, "false": False}


def _read_switch(name: str) -> bool:
  """Reads an environment variable that is on by default."""
  value = os.environ.get(name, "1")
  if value.lower() not in _SWITCH_VALUES:
    raise JaxCondPatchError(
        f"The environment variable {name} is {value!r}, and must be one of "
        f"{', '.join(_SWITCH_VALUES)}. See docs/pages/errors.md#switch.")
  return _SWITCH_VALUES[value.lower()]


def activate_on_import() -> None:
  """Activates, unless the environment says no or this JAX is unknown."""
  global _reason
  if not _read_switch(_SWITCH):
    _reason = f"{_SWITCH}={os.environ[_SWITCH]}"
    _logger.info("JAX is not patched: %s", _reason)
    return
  try:
    activate()
  except UnsupportedJaxVersionError as error:
    _reason = str(error)
    warnings.warn(str(error), UnsupportedJaxVersionWarning, stacklevel=3)
