"""Tells what becomes of the platform conditionals of a program.

`explain` traces a function and follows its platform conditionals for some
lowering platforms. It runs and compiles nothing; the branches that are taken
are lowered, to learn whether they can be.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import html
import os
import textwrap

from jax_cond_patch import activation


@dataclasses.dataclass(frozen=True)
class Location:
  """A line of the user's code; prints as `file:line (function)`.

  Attributes:
    file: the path of the file, or "" if it is not known.
    line: the number of the line.
    function: the name of the function.
  """
  file: str = ""
  line: int = 0
  function: str = ""

  def __str__(self) -> str:
    if not self.file:
      return "unknown"
    here = os.path.join(os.getcwd(), "")
    file = self.file.removeprefix(here)
    return f"{file}:{self.line} ({self.function})"


@dataclasses.dataclass(frozen=True)
class Failure:
  """A primitive that cannot be lowered for a platform that needs it.

  Attributes:
    primitive: its name, or "" if only the branch or the program as a whole
      cannot be lowered.
    location: where it is used.
    platforms: the lowering platforms.
    error: the type and the first line of the error that JAX raises.
  """
  primitive: str
  location: Location
  platforms: tuple[str, ...]
  error: str


@dataclasses.dataclass(frozen=True)
class Deferred:
  """An error of a transformation that is raised when it is lowered.

  Attributes:
    location: where in the program it stands.
    error: its type and the first line of its message.
  """
  location: Location
  error: str


@dataclasses.dataclass(frozen=True)
class Branch:
  """A branch of a platform conditional.

  Attributes:
    platforms: the platforms that it is for, or None if it is the default.
    taken_on: the lowering platforms that take it.
    equations: how many equations it has, at any depth.
    failures: what cannot be lowered where it is taken, outside of
      `conditionals`.
    deferred: the deferred errors in it, outside of `conditionals`.
    conditionals: the platform conditionals in it.
  """
  platforms: tuple[str, ...] | None
  taken_on: tuple[str, ...]
  equations: int
  failures: tuple[Failure, ...]
  deferred: tuple[Deferred, ...]
  conditionals: tuple[Conditional, ...]

  def fails_on(self, platform: str) -> bool:
    """Whether this branch, taken on a platform, cannot be lowered there."""
    return platform in self.taken_on and bool(
        self.deferred or any(platform in f.platforms for f in self.failures))


@dataclasses.dataclass(frozen=True)
class Conditional:
  """A platform conditional.

  Attributes:
    location: where `platform_dependent` is called.
    inside: the loops, jitted functions and so on that it is in, up to the
      branch or the program around it.
    platforms: the lowering platforms that reach it.
    missing: those that it has no branch for.
    branches: its branches.
    times: how often it stands there in the same way.
  """
  location: Location
  inside: tuple[str, ...]
  platforms: tuple[str, ...]
  missing: tuple[str, ...]
  branches: tuple[Branch, ...]
  times: int = 1

  def fails_on(self, platform: str) -> bool:
    """Whether this, or a conditional in it, cannot be lowered there."""
    return platform in self.missing or any(
        branch.fails_on(platform) or
        any(c.fails_on(platform) for c in branch.conditionals)
        for branch in self.branches)


@dataclasses.dataclass(frozen=True)
class Count:
  """How many equations a lowering keeps, at any depth.

  Attributes:
    platforms: what it lowers for.
    kept: the equations that are lowered.
    dropped: the others: those of branches not taken, and dead ones.
  """
  platforms: tuple[str, ...]
  kept: int
  dropped: int


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What becomes of the platform conditionals of a program.

  It prints as a table, and draws itself in a notebook.

  Attributes:
    name: the name of the function.
    platforms: the lowering platforms.
    equations: how many equations were traced, at any depth.
    counts: how many of them are lowered, for each platform alone, and for all
      of them together.
    failures: what cannot be lowered outside of `conditionals`.
    deferred: the deferred errors outside of `conditionals`.
    conditionals: the platform conditionals, those in branches under these.
  """
  name: str
  platforms: tuple[str, ...]
  equations: int
  counts: tuple[Count, ...]
  failures: tuple[Failure, ...]
  deferred: tuple[Deferred, ...]
  conditionals: tuple[Conditional, ...]

  def fails_on(self, platform: str) -> bool:
    """Whether something here cannot be lowered for a platform."""
    return bool(self.deferred) or any(
        platform in f.platforms for f in self.failures) or any(
            c.fails_on(platform) for c in self.conditionals)

  def __str__(self) -> str:
    return _as_text(self)

  def _repr_html_(self) -> str:
    return _as_html(self)


def explain(fun: Callable, *args,
            platforms: Sequence[str] = ("cpu", "tpu")) -> Explanation:
  """Tells what becomes of the platform conditionals of a function.

  The function is traced, on a patched JAX in any case; it is not run.

  Args:
    fun: a function of arrays, jitted or not.
    *args: its arguments, or `jax.ShapeDtypeStruct`s in their place.
    platforms: the lowering platforms, one as in `jax.jit` or several as in
      `jax.export`.

  Returns:
    An `Explanation`.

  Raises:
    ValueError: `platforms` is empty or holds "gpu".
  """
  platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
  if not platforms or "gpu" in platforms:
    raise ValueError(
        f"explain got the platforms {platforms}. Give at least one, and "
        "'cuda' or 'rocm' for 'gpu'. See "
        "docs/pages/errors.md#explain-platforms.")
  with activation.activated():
    from jax_cond_patch import conditionals
    return conditionals.explain(fun, args, platforms)


# Text.

def _branch_name(branch: Branch) -> str:
  return "default" if branch.platforms is None else ", ".join(branch.platforms)


def _title(conditional: Conditional) -> str:
  inside = "".join(f" in {label}" for label in conditional.inside[::-1])
  times = f", {conditional.times} times" if conditional.times > 1 else ""
  return f"{conditional.location}{inside}{times}"


def _failure_text(failure: Failure) -> str:
  where = f"{failure.primitive} at {failure.location}: "
  return (f"{', '.join(failure.platforms)}: "
          f"{where if failure.primitive else ''}{failure.error}")


def _deferred_text(deferred: Deferred) -> str:
  return f"deferred at {deferred.location}: {deferred.error}"


def _remarks(e: Branch | Explanation) -> list[str]:
  return [*map(_failure_text, e.failures), *map(_deferred_text, e.deferred)]


def _heading(e: Explanation) -> list[str]:
  number = sum(_sizes(e.conditionals))
  noun = "conditional" if number == 1 else "conditionals"
  lines = [f"{e.name} for {', '.join(e.platforms)}: {number} platform {noun}, "
           f"{e.equations} equations traced"]
  for c in e.counts:
    fails = any(map(e.fails_on, c.platforms))
    lines.append(f"{' + '.join(c.platforms)}: " + (
        "cannot be lowered" if fails else
        f"equations kept {c.kept}, dropped {c.dropped}"))
  return lines


def _sizes(conditionals: Sequence[Conditional]) -> Iterator[int]:
  for c in conditionals:
    yield c.times * (1 + sum(
        sum(_sizes(branch.conditionals)) for branch in c.branches))


def _cell(branch: Branch, platform: str) -> str:
  if platform not in branch.taken_on:
    return "-"
  return "fails" if branch.fails_on(platform) else "taken"


def _wrapped(remark: str, width: int) -> list[str]:
  return textwrap.wrap(remark, width, initial_indent="! ",
                       subsequent_indent="  ", break_long_words=False)


def _rows(conditionals: Sequence[Conditional], platforms: Sequence[str],
          indent: str = "") -> Iterator[tuple[str, ...]]:
  """The rows of the table: one cell for a remark, or one for each column."""
  for c in conditionals:
    yield (indent + _title(c), "",
           *("none" if p in c.missing else "" for p in platforms))
    for branch in c.branches:
      yield (f"{indent}  {_branch_name(branch)}", str(branch.equations),
             *(_cell(branch, p) for p in platforms))
      for remark in _remarks(branch):
        for line in _wrapped(remark, 76 - len(indent)):
          yield (f"{indent}    {line}",)
      yield from _rows(branch.conditionals, platforms, indent + "    ")


def _as_text(e: Explanation) -> str:
  lines = _heading(e)
  for remark in _remarks(e):
    lines += _wrapped(remark, 80)
  if not e.conditionals:
    return "\n".join(lines)
  rows = [("platform conditional", "eqns", *e.platforms),
          *_rows(e.conditionals, e.platforms)]
  full = [row for row in rows if len(row) > 1]
  widths = [max(map(len, column)) for column in zip(*full)]
  lines.append("")
  for row in rows:
    first, *others = row
    cells = [cell.rjust(width) if i == 0 else cell.ljust(width)
             for i, (cell, width) in enumerate(zip(others, widths[1:]))]
    lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
  return "\n".join(lines)


# HTML. The styles stand in the elements, since notebooks share one page, and
# some of them drop style sheets.

# So many conditionals of one place are drawn open; the others are folded.
_DRAWN = 8

_COLORS = dict(taken="#1a7f37", fails="#cf222e", none="#cf222e")
_FONT = "font:13px/1.45 system-ui,sans-serif;color:#1f2328"


def _as_html(e: Explanation) -> str:
  title, *counts = map(html.escape, _heading(e))
  return (
      f'<div style="{_FONT};background:#fff;padding:8px;max-width:72em">'
      f'<b>{title}</b><div style="color:#59636e">{"; ".join(counts)}</div>'
      f"{''.join(map(_html_remark, _remarks(e)))}"
      f"{_html_conditionals(e.conditionals, e.platforms)}</div>")


def _html_conditionals(conditionals: Sequence[Conditional],
                       platforms: Sequence[str]) -> str:
  drawn = [_html_conditional(c, platforms) for c in conditionals]
  parts = drawn[:_DRAWN]
  if rest := drawn[_DRAWN:]:
    parts.append(
        '<details style="margin:6px 0"><summary style="cursor:pointer">'
        f"{len(rest)} more platform conditionals</summary>{''.join(rest)}"
        "</details>")
  return "".join(parts)


def _html_conditional(c: Conditional, platforms: Sequence[str]) -> str:
  missing = "".join(
      _html_chip(p, "none", "no branch") for p in platforms if p in c.missing)
  branches = "".join(_html_branch(b, platforms) for b in c.branches)
  return (
      '<div style="border:1px solid #d1d9e0;border-radius:6px;margin:6px 0;'
      'padding:6px 8px;background:#f6f8fa">'
      f'<div style="font-family:monospace">{html.escape(_title(c))} {missing}'
      '</div><div style="display:flex;flex-wrap:wrap;gap:8px;'
      f'align-items:flex-start;margin-top:6px">{branches}</div></div>')


def _html_branch(branch: Branch, platforms: Sequence[str]) -> str:
  taken = bool(branch.taken_on)
  chips = "".join(
      _html_chip(p, _cell(branch, p), _cell(branch, p)) for p in platforms
      if p in branch.taken_on) or "not taken"
  remarks = "".join(map(_html_remark, _remarks(branch)))
  nested = _html_conditionals(branch.conditionals, platforms)
  if nested and not taken:
    nested = ("<details><summary style=\"cursor:pointer\">platform conditionals"
              f" in it</summary>{nested}</details>")
  border = "1px solid #8c959f" if taken else "1px dashed #afb8c1"
  color = "" if taken else "color:#6e7781;"
  return (
      f'<div style="border:{border};border-radius:6px;padding:4px 8px;{color}'
      'background:#fff;min-width:8em">'
      f"<b>{html.escape(_branch_name(branch))}</b>"
      '<span style="float:right;margin-left:1em">'
      f"{branch.equations} eqn{'s' * (branch.equations != 1)}</span>"
      f'<div style="margin:2px 0">{chips}</div>{remarks}{nested}</div>')


def _html_chip(platform: str, kind: str, text: str) -> str:
  return (
      f'<span style="background:{_COLORS[kind]};color:#fff;border-radius:8px;'
      f'padding:1px 7px;margin-right:4px;font-family:sans-serif">'
      f"{html.escape(platform)} {html.escape(text)}</span>")


def _html_remark(text: str) -> str:
  return (f'<div style="color:{_COLORS["fails"]};max-width:40em">'
          f"{html.escape(text)}</div>")

