"""Follows the platform conditionals of a traced program, for `explain`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import re

import jax
from jax._src import core
from jax._src import source_info_util

from jax_cond_patch import deferral
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch import resolution
from jax_cond_patch.compat import internals
from jax_cond_patch.explanation import Branch
from jax_cond_patch.explanation import Conditional
from jax_cond_patch.explanation import Count
from jax_cond_patch.explanation import Deferred
from jax_cond_patch.explanation import Explanation
from jax_cond_patch.explanation import Failure
from jax_cond_patch.explanation import Location


def explain(fun: Callable, args: Sequence, platforms: tuple[str, ...]
            ) -> Explanation:
  """Traces a function, on a patched JAX, and follows its conditionals."""
  jaxpr = jax.make_jaxpr(fun)(*args)
  walk = _Walk()
  # What fails is looked for only in a program that cannot be lowered.
  walk.look_for_failures = any(
      walk.lowering_error(core.jaxpr_as_fun(jaxpr), jaxpr.in_avals, jaxpr, p)
      for p in platforms)
  conditionals, deferred = walk.jaxpr(
      internals.open_jaxpr(jaxpr), platforms, Location(), (), True)
  failures = walk.failures(
      jaxpr, Location(), platforms, conditionals, deferred, True)
  sets = [(p,) for p in platforms] + [platforms] * (len(platforms) > 1)
  equations = _count_eqns(jaxpr)
  counts = []
  for names in sets:
    kept = _count_kept_eqns(_resolve(jaxpr, names), names)
    counts.append(Count(names, kept, equations - kept))
  return Explanation(getattr(fun, "__name__", repr(fun)), platforms, equations,
                     tuple(counts), failures, deferred, conditionals)


def _count_eqns(jaxpr) -> int:
  # The platform index belongs to its conditional, and is no equation of a user.
  return sum((eqn.primitive is not internals.platform_index_p) +
             sum(map(_count_eqns, core.jaxprs_in_params(eqn.params)))
             for eqn in internals.open_jaxpr(jaxpr).eqns)


def _resolve(jaxpr, platforms: tuple[str, ...]):
  return resolution.resolve(jaxpr, platforms, resolution.Scope.PROGRAM)


def _count_kept_eqns(resolved, platforms: tuple[str, ...]) -> int:
  """Counts what is lowered of a resolved jaxpr."""
  kept = 0
  for eqn in internals.open_jaxpr(resolved).eqns:
    if _is_kernel(eqn):
      kept += 1 + sum(map(_count_eqns, core.jaxprs_in_params(eqn.params)))
      continue
    kept += eqn.primitive is not internals.platform_index_p
    inner: Iterable[tuple]
    if resolution.is_platform_conditional(eqn):
      inner = zip(eqn.params["branches"], eqn.params[internals.PLATFORMS])
    else:
      here = _platforms_of(eqn, platforms)
      jaxprs = core.jaxprs_in_params(eqn.params)
      # Those of other primitives are resolved when they are lowered.
      inner = ((j if _is_transparent(eqn) else _resolve(j, here), here)
               for j in jaxprs)
    kept += sum(itertools.starmap(_count_kept_eqns, inner))
  return kept


def _is_transparent(eqn: core.JaxprEqn) -> bool:
  return eqn.primitive.name in resolution.TRANSPARENT_PRIMITIVES


def _is_kernel(eqn: core.JaxprEqn) -> bool:
  # A kernel is lowered for its own language, whatever the platform is called.
  return eqn.primitive.name == "pallas_call"


def _location(eqn: core.JaxprEqn, around: Location) -> Location:
  """Says where an equation was traced; JAX may not know, in a cached jaxpr."""
  match = re.fullmatch(r"(.*?):(\d+)(?::\d+)? \((.*)\)",
                       source_info_util.summarize(eqn.source_info))
  return Location(match[1], int(match[2]), match[3]) if match else around


def _first_line(error_type: str, message: str) -> str:
  return f"{error_type}: {(message.strip().splitlines() or [''])[0]}"


# The code of these sees names of axes that are not known outside of it.
_WITH_AXES = frozenset(["shard_map", "xla_pmap"])


class _Walk:
  """Finds the platform conditionals of a program.

  Code that stands `alone` can be lowered by itself, to see whether it can be:
  it uses no axis of a `shard_map` around it, and no reference.
  """

  def __init__(self):
    self.look_for_failures = True
    self._errors: dict[tuple, str | None] = {}
    self._kept_alive: list = []

  def jaxpr(self, jaxpr: core.Jaxpr, platforms: tuple[str, ...],
            around: Location, inside: tuple[str, ...], alone: bool
            ) -> tuple[tuple[Conditional, ...], tuple[Deferred, ...]]:
    """Returns its conditionals, and the deferred errors outside of them."""
    conditionals: dict[Conditional, int] = {}
    deferred: list[Deferred] = []
    for eqn in jaxpr.eqns:
      here = _platforms_of(eqn, platforms)
      location = _location(eqn, around)
      if resolution.is_platform_conditional(eqn):
        found = self._conditional(eqn, here, location, inside, alone)
        conditionals[found] = conditionals.get(found, 0) + 1
      elif eqn.primitive is deferral.deferred_error_p:
        error = eqn.params["deferred"]
        deferred.append(Deferred(
            location, _first_line(error.type.__name__, error.message)))
      elif not _is_kernel(eqn):
        for inner in core.jaxprs_in_params(eqn.params):
          more, errors = self.jaxpr(
              inner, here, location, (*inside, _label(eqn)),
              alone and eqn.primitive.name not in _WITH_AXES)
          deferred.extend(errors)
          for found in more:
            plain = dataclasses.replace(found, times=1)
            conditionals[plain] = conditionals.get(plain, 0) + found.times
    return (tuple(dataclasses.replace(c, times=times)
                  for c, times in conditionals.items()),
            tuple(dict.fromkeys(deferred)))

  def _conditional(self, eqn: core.JaxprEqn, platforms: tuple[str, ...],
                   location: Location, inside: tuple[str, ...],
                   alone: bool) -> Conditional:
    branches_platforms = eqn.params[internals.PLATFORMS]
    reachable = platforms_lib.reachable(branches_platforms, platforms)
    owned = dict(zip(reachable.branches, reachable.owned))
    branches = []
    for i, (names, branch) in enumerate(
        zip(branches_platforms, eqn.params["branches"])):
      taken_on = owned.get(i, ())
      conditionals, deferred = self.jaxpr(
          internals.open_jaxpr(branch), taken_on, location, (), alone)
      branches.append(Branch(
          names, taken_on, _count_eqns(branch),
          self.failures(branch, location, taken_on, conditionals, deferred,
                        alone),
          deferred, conditionals))
    return Conditional(location, inside, platforms, reachable.missing,
                       tuple(branches))

  def failures(self, branch, location: Location, taken_on: tuple[str, ...],
               conditionals: Sequence[Conditional],
               deferred: Sequence[Deferred], alone: bool
               ) -> tuple[Failure, ...]:
    """Finds what cannot be lowered in a branch, or in the whole program."""
    found: dict[tuple[str, Location, str], list[str]] = {}
    jaxpr = internals.open_jaxpr(branch)
    for platform in taken_on if self.look_for_failures else ():
      error = None
      if _is_alone(branch.in_avals, alone):
        error = self.lowering_error(
            core.jaxpr_as_fun(branch), branch.in_avals, branch, platform)
        if error is None:
          continue
      primitives = list(
          self._failing_eqns(jaxpr, platform, location, alone))
      explained = (primitives or deferred or
                   any(c.fails_on(platform) for c in conditionals))
      if error is not None and not explained:
        primitives = [("", location, error)]
      for failure in primitives:
        found.setdefault(failure, []).append(platform)
    return tuple(
        Failure(primitive, location, tuple(dict.fromkeys(names)), error)
        for (primitive, location, error), names in found.items())

  def _failing_eqns(self, jaxpr: core.Jaxpr, platform: str,
                    around: Location, alone: bool
                    ) -> Iterator[tuple[str, Location, str]]:
    """Finds what cannot be lowered, outside of platform conditionals."""
    for eqn in jaxpr.eqns:
      name = eqn.primitive.name
      if (resolution.is_platform_conditional(eqn) or eqn.primitive in (
          internals.platform_index_p, deferral.deferred_error_p)):
        continue
      (here,) = _platforms_of(eqn, (platform,))
      location = _location(eqn, around)
      avals = [v.aval for v in eqn.invars]
      if _is_transparent(eqn):
        for inner in core.jaxprs_in_params(eqn.params):
          yield from self._failing_eqns(
              inner, here, location, alone and name not in _WITH_AXES)
        continue
      if not all(isinstance(aval, core.ShapedArray) for aval in avals):
        continue  # JAX discharges references before it lowers
      error = None
      if not internals.has_lowering_rule(eqn.primitive, here):
        error = f"JAX has no lowering rule of {name} for {here}"
      elif _is_alone(avals, alone):
        error = self.lowering_error(
            lambda *args, eqn=eqn: eqn.primitive.bind(*args, **eqn.params),
            avals, eqn, here)
      if error is not None:
        yield name, location, error

  def lowering_error(self, fun: Callable, avals, key, platform: str
                     ) -> str | None:
    """Lowers a function by itself, and returns what JAX says if it fails."""
    if (id(key), platform) not in self._errors:
      self._kept_alive.append(key)
      args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
      error = None
      try:
        internals.lower_for(fun, args, platform)
      except Exception as e:  # whatever JAX raises is the answer
        error = _first_line(type(e).__name__, str(e))
      self._errors[id(key), platform] = error
    return self._errors[id(key), platform]


def _is_alone(avals: Sequence, alone: bool) -> bool:
  """Whether code with inputs of these types can be lowered by itself."""
  return alone and all(
      isinstance(aval, core.ShapedArray) and
      all(isinstance(size, int) for size in aval.shape) for aval in avals)


def _platforms_of(eqn: core.JaxprEqn, platforms: tuple[str, ...]
                  ) -> tuple[str, ...]:
  # What is never reached is not reached in a `compute_on` either.
  if not platforms:
    return ()
  ctx = getattr(eqn, "ctx", None)
  return internals.platforms_for_eqn_ctx(ctx) or platforms


def _label(eqn: core.JaxprEqn) -> str:
  if eqn.primitive.name in ("jit", "pjit"):
    return f"jit {eqn.params['name']}"
  return eqn.primitive.name
