"""Puts the replacements into JAX and takes them out again.

`table` is the one list of what is replaced; activation, deactivation, status,
the documentation and the tests all read it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
import types
from typing import Any
import warnings

from jax_cond_patch.compat import releases
from jax_cond_patch.errors import JaxCondPatchError
from jax_cond_patch.errors import UnsupportedJaxVersionError
from jax_cond_patch.errors import UnsupportedJaxVersionWarning
from jax_cond_patch.errors import UntestedJaxVersionWarning

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
  for name in _late_tables():
    # The exporter of JAX 0.4.24 to 0.4.29 needs flatbuffers.
    with contextlib.suppress(ImportError):
      importlib.import_module(name)
  return _table()


def _table() -> Sequence[Replacement]:
  """As `table`, of the modules that are imported."""
  late = (replacement for name, late_table in _late_tables().items()
          if name in sys.modules
          for replacement in late_table(sys.modules[name]))
  *most, lowering, tracing = _early_table()
  return _additions_first((*most, *late, lowering, tracing))


@functools.cache
def _early_table() -> Sequence[Replacement]:
  from jax._src import ad_checkpoint
  from jax._src import core
  from jax._src import effects
  from jax._src.interpreters import ad
  from jax._src.interpreters import batching
  from jax._src.interpreters import mlir
  from jax._src.interpreters import partial_eval as pe
  from jax._src.interpreters import pxla
  from jax._src.lax.control_flow import conditionals
  from jax._src.lax.control_flow import loops
  from jax._src.state import discharge
  from jax_cond_patch import deferral
  from jax_cond_patch import eager
  from jax_cond_patch import lowering
  from jax_cond_patch import pinning
  from jax_cond_patch import resolution
  from jax_cond_patch import rules
  from jax_cond_patch.compat import internals

  cond_p = internals.cond_p
  modules = dict(ad=ad, batching=batching, discharge=discharge)
  batching_tables = ("fancy_primitive_batchers", "spmd_axis_primitive_batchers",
                     "axis_primitive_batchers")
  made = []

  def replace(name, place, make, why):
    made.append(Replacement(name, place, make, why))

  def add(name, place, value, why):
    made.append(Replacement(name, place, lambda: value, why, is_addition=True))

  def replace_rule(table_name, rules_table, make, why):
    replace(f"{table_name}[cond_p]", Item(rules_table, cond_p), make, why)

  internals.import_wrappers()
  replace("cond_p.impl", Attribute(cond_p, "impl"), rules.impl,
          "runs the branch taken if another one can't be lowered")

  def replace_where_it_is(module, names, primitive, make, why):
    """For a rule that stands in one of several tables, by release."""
    for name in names:
      rules_table = getattr(modules[module], name, None)
      # JAX 0.4.36 to 0.5 have objects that only take entries, for old names.
      if isinstance(rules_table, dict) and primitive in rules_table:
        key = "cond_p" if primitive is cond_p else f"{primitive}_p"
        replace(f"{module}.{name}[{key}]", Item(rules_table, primitive), make,
                why)

  index_why = "the platform index is not passed on, but made again"
  add("pe.partial_eval_jaxpr_custom_rules[platform_index_p]",
      Item(pe.partial_eval_jaxpr_custom_rules, internals.platform_index_p),
      rules.platform_index_partial_eval_custom, index_why)
  why = _RULE_WHY
  why_eager = "keeps nothing of branches that do not run"
  replace_rule("pe.custom_partial_eval_rules", pe.custom_partial_eval_rules,
               lambda rule: eager.partial_eval(rules.partial_eval(rule)),
               f"{why}; {index_why}; {why_eager}")
  replace_rule("pe.partial_eval_jaxpr_custom_rules",
               pe.partial_eval_jaxpr_custom_rules, rules.partial_eval_custom,
               why)
  for module, names, make, reason in (
      ("ad", ("primitive_jvps",), rules.jvp, why),
      ("ad", ("primitive_linearizations",),
       lambda rule: eager.linearize(rules.linearize(rule)),
       f"{why}; {index_why}; {why_eager}"),
      ("ad", ("primitive_transposes", "reducing_transposes"), rules.transpose,
       f"{why}; {index_why}"),
      ("ad", ("fancy_transposes",), rules.fancy_transpose, why),
      ("batching", batching_tables, rules.batching, why),
      ("discharge", ("_partial_discharge_rules", "_discharge_rules"),
       rules.discharge, why)):
    replace_where_it_is(module, names, cond_p, make, reason)
  if any(cond_p in getattr(ad, name, ()) for name in (
      "primitive_transposes", "reducing_transposes")):
    add("ad.primitive_transposes[platform_index_p]",
        Item(ad.primitive_transposes, internals.platform_index_p),
        rules.platform_index_transpose, index_why)
  why_effects = "defers errors of the effects of branches"
  replace(f"pe.custom_partial_eval_rules[{ad_checkpoint.remat_p}]",
          Item(pe.custom_partial_eval_rules, ad_checkpoint.remat_p),
          lambda rule: eager.partial_eval(rules.remat_partial_eval(rule)),
          f"{why_effects}; {why_eager}")
  # What `jax.checkpoint` makes with `jax_remat3`. It refuses effects since JAX
  # 0.11.1: https://github.com/jax-ml/jax/commit/97f0ef2433.
  traced = getattr(ad_checkpoint, "RematTraced", None)
  if hasattr(traced, "_check_differentiable"):
    for name in ("vjp_fwd", "lin"):
      replace(f"ad_checkpoint.RematTraced.{name}", Attribute(traced, name),
              rules.remat_method, why_effects)
  replace_where_it_is("batching", batching_tables, loops.while_p,
                      rules.while_batching, why_effects)
  if cond_p in internals.remat_rules():
    replace_rule("remat.rules", internals.remat_rules(), rules.remat, why)
  if internals.has_closed_jaxprs:
    replace_rule("pe.dce_rules", pe.dce_rules, rules.dce,
                 "keeps compute_on, closes equal jaxprs to the same one")
  if internals.has_strict_to_lojax():
    replace("cond_p.to_lojax", Attribute(cond_p, "to_lojax"),
            rules.passes_platforms, "keeps platforms")
  if not internals.native:
    if "bind" in vars(cond_p):
      replace("cond_p.bind", Attribute(cond_p, "bind"), rules.cond_bind,
              "keeps platforms")
    replace_rule("core.custom_typechecks", core.custom_typechecks,
                 rules.ignores_platforms, "does not know platforms")

  for primitive in (internals.jit_p, loops.scan_p):
    replace(f"pe.custom_partial_eval_rules[{primitive}_p]",
            Item(pe.custom_partial_eval_rules, primitive), eager.partial_eval,
            why_eager)
    replace_where_it_is("ad", ("primitive_linearizations",), primitive,
                        eager.linearize, why_eager)

  # Where there is a rule for linearization, it knows references.
  if cond_p not in getattr(ad, "primitive_linearizations", ()):
    replace("ad.primitive_jvps[run_state_p]",
            Item(ad.primitive_jvps, discharge.run_state_p),
            rules.run_state_jvp, "branches may read and write references")
  if internals.has_graph_conversion():
    from jax_cond_patch import jax2tf
    for primitive, convert in (
        (cond_p, jax2tf.cond),
        (internals.platform_index_p, jax2tf.platform_index),
        (pinning.pinned_p, jax2tf.pinned),
        (deferral.deferred_error_p, jax2tf.deferred_error)):
      add(f"{primitive}_p.bind_with_trace",
          Item(vars(primitive), "bind_with_trace"),
          jax2tf.bind_with_trace(primitive, convert),
          "jax2tf has no graph for platforms")

  add("ad.primitive_transposes[pinned_p]",
      Item(ad.primitive_transposes, pinning.pinned_p), pinning.pinned_transpose,
      "it is made again, as the platform index is")
  for name in pinning.ALLOWED_EFFECTS:
    add(f"effects.{name}: PinnedEffect",
        Member(getattr(effects, name)._effect_types, pinning.PinnedEffect),
        pinning.PinnedEffect, "programs may be traced under a pin")

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
  # The names of axes and more in one object came with JAX 0.4.36:
  # https://github.com/jax-ml/jax/commit/c36e1f7c1a.
  batchers = ("fancy_primitive_batchers"
              if hasattr(batching, "fancy_primitive_batchers")
              else "axis_primitive_batchers")
  for table_name, rules_table, primitive, own_rule in (
      ("ad.primitive_jvps", ad.primitive_jvps, deferral.deferred_error_p,
       deferral.deferred_error_jvp),
      ("ad.primitive_jvps", ad.primitive_jvps, deferral.undifferentiable_p,
       deferral.undifferentiable_jvp),
      ("ad.primitive_transposes", ad.primitive_transposes,
       deferral.deferred_error_p, deferral.deferred_error_transpose),
      (f"batching.{batchers}", getattr(batching, batchers),
       deferral.deferred_error_p, deferral.deferred_error_batching)):
    add(f"{table_name}[{primitive}]", Item(rules_table, primitive), own_rule,
        "a rule of our own")
  replace("pxla.lower_sharding_computation",
          Attribute(pxla, "lower_sharding_computation"),
          lowering.lower_sharding_computation,
          "lowers only what the lowering platforms reach")
  replace("lax.platform_dependent.__code__",
          Attribute(conditionals.platform_dependent, "__code__"),
          lambda _: rules.platform_dependent_code.__code__,
          "stages a conditional with platforms, branches told by identity")
  # Rules of our own stand there before anything needs them, and the two that
  # mark conditionals come last. It is undone in the opposite order.
  return _additions_first(made)


def _additions_first(made: Iterable[Replacement]) -> Sequence[Replacement]:
  return tuple(sorted(made, key=lambda r: not r.is_addition))


_RULE_WHY = "keeps platforms, passes over each branch once, defers errors"


def _checkify_table(checkify) -> Iterator[Replacement]:
  from jax_cond_patch import rules
  from jax_cond_patch.compat import internals
  yield Replacement(
      "checkify.error_checks[cond_p]",
      Item(checkify.error_checks, internals.cond_p), rules.checkify, _RULE_WHY)


def _shard_map_table(shard_map) -> Iterator[Replacement]:
  from jax_cond_patch import deferral
  from jax_cond_patch import pinning
  from jax_cond_patch import rules
  from jax_cond_patch.compat import internals
  for name, make, own_rule in (
      ("_check_rules", rules.shard_map_check, rules.check_own),
      ("_rewrite_rules", rules.shard_map_rewrite, rules.rewrite_own)):
    rules_table = getattr(shard_map, name)
    # It has rules for conditionals since JAX 0.4.36:
    # https://github.com/jax-ml/jax/commit/dfabcb027d.
    if internals.cond_p in rules_table:
      yield Replacement(
          f"shard_map.{name}[cond_p]", Item(rules_table, internals.cond_p),
          make, "keeps platforms, defers errors")
    for primitive in (deferral.deferred_error_p, pinning.pinned_p):
      rule = functools.partial(own_rule, primitive)
      yield Replacement(
          f"shard_map.{name}[{primitive}]", Item(rules_table, primitive),
          lambda rule=rule: rule, "a rule of our own", is_addition=True)


def _export_table(export) -> Iterator[Replacement]:
  from jax_cond_patch import pinning
  for name in ("_module_to_bytecode", "_serialize_module"):  # up to JAX 0.4.23
    if hasattr(export, name):
      yield Replacement(
          f"export.{name}", Attribute(export, name),
          pinning.module_to_bytecode, "says the pin in what is exported")


@functools.cache
def _late_tables() -> dict[str, Callable[[Any], Iterator[Replacement]]]:
  """Tables for modules that `import jax` does not import, by their names.

  Their import takes as long as that of all of this package.
  """
  from jax_cond_patch.compat import internals
  tables: dict[str, Callable[[Any], Iterator[Replacement]]] = {
      "jax._src.checkify": _checkify_table,
      internals.export_module(): _export_table}
  if not internals.native:
    tables["jax.experimental.shard_map"] = _shard_map_table
  return tables


class _LateFinder:
  """Replaces what is to be replaced in a module once it is imported."""

  def find_spec(self, name, path=None, target=None):
    if name not in _late_tables():
      return None
    for finder in sys.meta_path:
      if finder is not self and hasattr(finder, "find_spec"):
        spec = finder.find_spec(name, path, target)
        if spec is not None:
          self._extend(name, spec.loader)
          return spec
    return None

  def _extend(self, name: str, loader) -> None:
    execute = loader.exec_module
    def exec_module(module):
      execute(module)
      with _lock:
        if is_active():
          late = _put_in(_additions_first(_late_tables()[name](module)))
          # See `_early_table`.
          additions = sum(r.is_addition for r, _, _ in _undo)
          _undo[additions:additions] = late
    loader.exec_module = exec_module


_finder = _LateFinder()


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
  # A process that is forked in the middle of a switch would stay there.
  os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release,
                      after_in_child=_lock.release)
# What activation has put in, and what stood there: a stack to undo.
_undo: list[tuple[Replacement, Any, Any]] = []
_reason = "not activated yet"
_pin: tuple[str, ...] | None = None


def has_patches() -> bool:
  """Whether the change is in the source of the installed JAX.

  The diffs in `patches` put the module in that this looks for.
  """
  try:
    return importlib.util.find_spec(
        "jax._src.interpreters.platforms") is not None
  except Exception:  # There is no JAX, or it can't be imported: `_check_jax`.
    return False


def is_active() -> bool:
  """Whether the replacements are in JAX."""
  return bool(_undo)


def replaced() -> list[tuple[str, Any]]:
  """What JAX has, and is to be replaced, with its name; None if it has not."""
  found = [(r.name, r.place.get()) for r in table() if not r.is_addition]
  return [(name, None if x is _ABSENT else x) for name, x in found]


_UNTESTED = "JAX_COND_PATCH_UNTESTED"


def _check_jax() -> str | None:
  """Raises if the installed JAX is not to be patched.

  Returns:
    A warning that this JAX is patched but not tested, or None.
  """
  error = _import_error()
  found = releases.installed()
  if found is None:
    raise UnsupportedJaxVersionError(
        "jax_cond_patch cannot patch JAX: no JAX is installed. Install one: "
        f"{_supported()}. See docs/pages/errors.md#unknown-jax.")
  if error is not None:
    jaxlib = releases.installed("jaxlib")
    raise UnsupportedJaxVersionError(
        f"jax_cond_patch cannot patch JAX: JAX {found} with "
        f"{f'jaxlib {jaxlib}' if jaxlib else 'no jaxlib'} cannot be imported "
        f"({type(error).__name__}: {error}). Install the jaxlib that belongs "
        f"to it: pip install 'jax=={found}' with its jaxlib. See "
        "docs/pages/errors.md#unknown-jax.") from error
  if releases.find(found) is not None:
    return None
  untested = _read_switch(_UNTESTED, default=None)
  if untested is False or (untested is None and not releases.is_newer(found)):
    raise UnsupportedJaxVersionError(
        f"jax_cond_patch cannot patch JAX: JAX {found} is installed, and "
        f"{_supported()}. JAX is left as it is. Install one of these, or a "
        f"newer jax_cond_patch, or set {_UNTESTED}=1 to try it. See "
        "docs/pages/errors.md#unknown-jax.")
  if untested is None:
    changes = _differences()
    if changes:
      raise UnsupportedJaxVersionError(
          f"jax_cond_patch cannot patch JAX: JAX {found} is installed, "
          f"{_supported()}, and it has changed: {'; '.join(changes)}. JAX is "
          "left as it is. Install a supported release, or a newer "
          f"jax_cond_patch, or set {_UNTESTED}=1 to try it. See "
          "docs/pages/errors.md#unknown-jax.")
  return (f"jax_cond_patch is not tested on JAX {found}: {_supported()}. JAX "
          f"is patched nevertheless; set {_UNTESTED}=0 to leave it as it is. "
          "See docs/pages/errors.md#untested-jax.")


def _supported() -> str:
  return f"the supported releases are {releases.supported()}"


def _import_error() -> Exception | None:
  try:
    import jax  # noqa: F401
  except Exception as error:  # JAX raises what it likes for a wrong jaxlib.
    return error
  return None


def _differences() -> list[str]:
  from jax_cond_patch.compat import structure
  try:
    return structure.differences(replaced())
  except Exception as error:  # A name that is gone, anywhere in `compat`.
    return [f"{type(error).__name__}: {error}"]


def activate(pin: Sequence[str] | None = None,
             defer: bool | None = None) -> None:
  """Patches JAX, if it is not patched.

  Args:
    pin: as `pin`; None leaves the pin as it is.
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
  _activate(pin, defer, stacklevel=3)


def _activate(pin: Sequence[str] | None, defer: bool | None,
              stacklevel: int) -> None:
  global _reason
  with _lock:
    if pin is not None:
      pin = _valid_pin(pin)
    if is_active():
      _choose_deferral(defer)
      if pin is not None:
        _set_pin(pin)
      return
    if has_patches():
      if pin is not None:
        raise JaxCondPatchError(
            "JAX cannot be pinned to platforms: the change is in its source "
            "(jax_cond_patch/patches), which has no pins. Use the JAX that was "
            "released, or no pin. See docs/pages/errors.md#pin-in-source.")
      _reason = ("the change is in the source of this JAX, from "
                 "jax_cond_patch/patches; there is nothing to patch")
      _logger.info("JAX is left as it is: %s", _reason)
      return
    warning = _check_jax()
    _choose_deferral(defer)
    undo = _put_in(_table())
    try:
      _forget()
    except BaseException:
      _restore(undo)
      raise
    _undo.extend(undo)
    sys.meta_path.insert(0, _finder)
    _hide_own_frames()
    _reason = warning or "activated"
    if pin is not None:
      _set_pin(pin)
    _logger.info("JAX %s is patched in %d places", releases.installed(),
                 len(_undo))
  if warning is not None:
    _warn_untested(warning, stacklevel + 1)


_has_warned = False


def _warn_untested(warning: str, stacklevel: int) -> None:
  global _has_warned
  if not _has_warned:
    _has_warned = True
    warnings.warn(warning, UntestedJaxVersionWarning, stacklevel=stacklevel)


# Whether errors are deferred; None until something was chosen.
_defer: bool | None = None


def _choose_deferral(defer: bool | None) -> None:
  global _defer
  if defer is None:
    defer = bool(_read_switch(_DEFER_SWITCH)) if _defer is None else _defer
  if defer == _defer:
    return
  from jax_cond_patch import deferral
  _defer = deferral.enabled = defer
  if is_active():
    _clear_caches()


def _put_in(replacements: Sequence[Replacement]
            ) -> list[tuple[Replacement, Any, Any]]:
  """Puts in all replacements or none, and returns what undoes it."""
  undo: list[tuple[Replacement, Any, Any]] = []
  try:
    for replacement, original, new in _prepare(replacements):
      replacement.place.set(new)
      undo.append((replacement, original, new))
  except BaseException:
    _restore(undo)
    raise
  return undo


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


def _restore(undo: list[tuple[Replacement, Any, Any]], left: int = 0) -> None:
  while len(undo) > left:
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
    if _finder in sys.meta_path:
      sys.meta_path.remove(_finder)
    # In steps, since other threads may be in JAX. First those that mark
    # conditionals: tracing, then lowering, which marks what it has resolved.
    # What knows the marks follows when none is left, and then, when nothing
    # needs them, the rules of our own primitives.
    additions = sum(replacement.is_addition for replacement, _, _ in _undo)
    try:
      for left in (len(_undo) - 1, len(_undo) - 2, additions, 0):
        _restore(_undo, left)
        _forget()
    finally:  # whoever interrupts it does not want JAX half patched
      _restore(_undo)
      _reason = "deactivated"
    _logger.info("JAX is as it was before it was patched")


def pinned() -> tuple[str, ...] | None:
  """The platforms that JAX is pinned to, or None."""
  return _pin


def pin(platforms: Sequence[str] | None) -> None:
  """Promises that this process lowers for some platforms only.

  `platform_dependent` then traces only the branches of these; with one of them
  left, it calls it. What JAX has traced and compiled is forgotten. A program
  that was traced under a pin is not lowered for any other platform.

  Args:
    platforms: the names of the platforms, as those of the branches; None
      promises nothing.
  """
  with _lock:
    _set_pin(None if platforms is None else _valid_pin(platforms))


def _valid_pin(platforms: Sequence[str]) -> tuple[str, ...]:
  names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
  if not names or not all(isinstance(n, str) and n.strip() for n in names):
    raise ValueError(
        "jax_cond_patch is pinned to the names of platforms, as in "
        f"('cpu', 'cuda'), and got {platforms!r}. See "
        "docs/pages/errors.md#pin-names.")
  if "gpu" in names:
    raise ValueError("Pin jax_cond_patch to 'cuda' or 'rocm', not to 'gpu'. "
                     "See docs/pages/errors.md#pin-names.")
  return tuple(dict.fromkeys(names))


def _set_pin(platforms: tuple[str, ...] | None) -> None:
  global _pin
  if platforms != _pin:
    _pin = platforms
    if is_active():
      _clear_caches()


def _clear_caches() -> None:
  from jax_cond_patch import sharing
  from jax_cond_patch.compat import internals
  # Another thread has crashed collecting garbage while JAX dropped its caches
  # (JAX 0.4.21).
  with _without_garbage_collection():
    internals.clear_caches()
    sharing.forget()


# What other threads do in JAX is waited for, but not for ever: one may be in a
# long compilation, or wait for this thread.
_PATIENCE_SECONDS = 10


def _forget() -> None:
  """Clears JAX's caches, also of what other threads are about to put there."""
  _clear_caches()
  calls = _calls_of_jax()
  if not calls:
    return
  deadline = time.monotonic() + _PATIENCE_SECONDS
  while calls and time.monotonic() < deadline:
    time.sleep(.001)
    now = _calls_of_jax()
    calls = {thread: call for thread, call in calls.items()
             if now.get(thread) is call}
  for call in calls.values():
    _logger.warning("JAX is switched while another thread is in it, at %s:%s",
                    call.f_code.co_filename, call.f_lineno)
  _clear_caches()


def _calls_of_jax() -> dict[int, types.FrameType]:
  """The outermost frame of JAX in each other thread that is in JAX.

  In free-threaded Python none is found: frames can't be read while they run.
  """
  import jax
  from jax_cond_patch.compat import internals
  directory = os.path.dirname(jax.__file__) + os.sep
  calls: dict[int, types.FrameType] = {}
  if not internals.has_gil:
    return calls
  # Each frame gets an object when it is read. If this object's memory made
  # Python collect garbage, what that runs could let the thread return from the
  # frame, and the object would be of a frame that is gone.
  with _without_garbage_collection():
    for thread, frame in sys._current_frames().items():
      here: types.FrameType | None = frame
      while thread != threading.get_ident() and here is not None:
        if here.f_code.co_filename.startswith(directory):
          calls[thread] = here
        here = here.f_back
  return calls


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
  """A context in which no thread begins to collect garbage by itself."""
  enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if enabled:
      gc.enable()


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
    pin: the platforms that JAX is pinned to while it is patched, or None.
  """
  active: bool
  reason: str
  jax_version: str | None
  era: releases.Era | None
  replaced: tuple[str, ...]
  defers: bool
  pin: tuple[str, ...] | None


def status() -> Status:
  """Says whether JAX is patched, why, and what is replaced."""
  with _lock:
    found = releases.installed()
    release = releases.find(found) if found else None
    return Status(
        active=is_active(), reason=_reason, jax_version=found,
        era=release and release.era,
        replaced=tuple(replacement.name for replacement, _, _ in _undo),
        defers=is_active() and bool(_defer), pin=_pin)


_SWITCH = "JAX_COND_PATCH"
_DEFER_SWITCH = "JAX_COND_PATCH_DEFER"
_PIN = "JAX_COND_PATCH_PIN"
# The environment variables that are read.
SWITCHES = (_SWITCH, _DEFER_SWITCH, _PIN, _UNTESTED)
_SWITCH_VALUES = {"1": True, "true": True, "0": False, "false": False}


def _read_switch(name: str, default: bool | None = True) -> bool | None:
  """Reads an environment variable."""
  value = os.environ.get(name)
  if value is None:
    return default
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
  pin = None
  if _PIN in os.environ:
    try:
      pin = _valid_pin([n.strip() for n in os.environ[_PIN].split(",")])
    except ValueError as error:
      raise JaxCondPatchError(
          f"The environment variable {_PIN} is {os.environ[_PIN]!r}, and must "
          "be the names of platforms with commas between them, such as "
          f"cpu,cuda. {error}") from None
  try:
    _activate(pin, None, stacklevel=4)
  except UnsupportedJaxVersionError as error:
    _reason = str(error)
    warnings.warn(str(error), UnsupportedJaxVersionWarning, stacklevel=3)
