"""Runs programs that platform conditionals break, before and after.

`main` runs each program of `PROGRAMS` in two child interpreters, which differ
in the environment variable JAX_COND_PATCH alone, and prints a table. A child is
`python -m jax_cond_patch.demo NAME`; it writes an `Outcome` in JSON.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np

from jax_cond_patch.compat import releases


@dataclasses.dataclass(frozen=True)
class Program:
  """A program with one platform conditional.

  Attributes:
    title: what it is.
    fun: a function of arrays; it imports JAX itself.
    args: makes its arguments, NumPy arrays.
    reference: computes the same in NumPy.
    platforms: what it is lowered for; if more than the CPU, it is exported.
    reached: the branches that these platforms reach.
  """
  title: str
  fun: Callable[..., Any]
  args: Callable[[], tuple[np.ndarray, ...]]
  reference: Callable[..., np.ndarray]
  platforms: tuple[str, ...] = ("cpu",)
  reached: tuple[str, ...] = ("default",)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a program in a child interpreter.

  Attributes:
    result: its value and how far that is off, or its error.
    is_right: whether the value is that of NumPy.
    is_available: whether this JAX has all that the program uses.
    branches: the branches of its conditional in the StableHLO module.
    module_size: the size in bytes of the text of this module.
  """
  result: str
  is_right: bool = False
  is_available: bool = True
  branches: tuple[str, ...] | None = None
  module_size: int | None = None


# The programs.

_SCOPE = "demo_branch_"


def platform_dependent(*args, **branches: Callable):
  """`jax.lax.platform_dependent`, its branches in scopes that name them."""
  import jax

  def scoped(platform, branch):
    def scoped_branch(*args):
      with jax.named_scope(_SCOPE + platform):
        return branch(*args)
    return scoped_branch

  return jax.lax.platform_dependent(
      *args, **{p: scoped(p, branch) for p, branch in branches.items()})


# Grouped matrix multiplication: the first 60 rows by one matrix, the other 68
# by another.
_GROUP_SIZES = (60, 68)


def _grouped_matmul(x, weights):
  """Multiplies groups of rows, by a Pallas kernel that only TPUs can run."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm
  return platform_dependent(
      x, weights, np.array(_GROUP_SIZES, np.int32),
      tpu=functools.partial(gmm, interpret=False),
      default=functools.partial(gmm, interpret=True))


def _scanned_grouped_matmul(x, layers):
  import jax

  def layer(x, weights):
    out = _grouped_matmul(x, weights)
    return out, out

  return jax.lax.scan(layer, x, layers)[1]


def _jitted_grouped_matmul(x, layers):
  import jax
  return jax.jit(_grouped_matmul)(x, layers[0])


def _grouped_matmul_args():
  rng = np.random.default_rng(42)
  x = rng.normal(size=(128, 128))
  layers = rng.normal(size=(3, 2, 128, 128)) / np.sqrt(128)
  return x.astype(np.float32), layers.astype(np.float32)


def _grouped_matmul_reference(x, layers):
  x, outs = x.astype(np.float64), []
  for first, second in layers.astype(np.float64):
    x = np.concatenate(
        [x[:_GROUP_SIZES[0]] @ first, x[_GROUP_SIZES[0]:] @ second])
    outs.append(x)
  return np.stack(outs)


def _searchsorted(table, queries):
  """Finds places in a sorted table, on the CPU by NumPy."""
  import jax
  import jax.numpy as jnp

  def by_numpy(table, queries):
    # JAX up to 0.4.33 calls one after the other, if not asked for more.
    parameters = inspect.signature(jax.pure_callback).parameters
    kwargs = dict(vmap_method="sequential") if (
        "vmap_method" in parameters) else {}
    return jax.pure_callback(
        lambda t, q: np.searchsorted(*map(np.asarray, (t, q))).astype(np.int32),
        jax.ShapeDtypeStruct(queries.shape, np.int32), table, queries, **kwargs)

  def by_jax(table, queries):
    return jnp.searchsorted(table, queries).astype(np.int32)

  return platform_dependent(table, queries, cpu=by_numpy, cuda=by_jax)


def _jitted_searchsorted(table, queries):
  import jax
  return jax.jit(_searchsorted)(table, queries)


def _scanned_searchsorted(table, queries):
  import jax
  step = lambda carry, row: (carry, _searchsorted(table, row))
  return jax.lax.scan(step, None, queries)[1]


def _mapped_searchsorted(table, queries):
  import jax
  return jax.jit(jax.vmap(_searchsorted, in_axes=(None, 0)))(table, queries)


def _searchsorted_args():
  rng = np.random.default_rng(7)
  table, queries = np.sort(rng.normal(size=64)), rng.normal(size=(4, 16))
  return table.astype(np.float32), queries.astype(np.float32)


def _doubled_by_kernel(x):
  """Doubles an array, by a Pallas kernel on TPUs."""
  import jax
  from jax.experimental import pallas as pl

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2

  return platform_dependent(
      x,
      tpu=pl.pallas_call(
          kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)),
      default=lambda x: x * 2)


def _jitted_doubled_by_kernel(x):
  import jax
  return jax.jit(_doubled_by_kernel)(x)


def _doubled_args():
  return (np.arange(8 * 128, dtype=np.float32).reshape(8, 128),)


def _doubled_reference(x):
  return x.astype(np.float64) * 2


_GMM = "megablox gmm (tpu=compiled, default=interpreted)"
_CALLBACK = "pure_callback to NumPy (cpu=) beside JAX code (cuda=)"
_KERNEL = "pallas_call (tpu=) beside a default"

PROGRAMS: dict[str, Program] = {
    "gmm-scan": Program(
        f"{_GMM} in scan", _scanned_grouped_matmul, _grouped_matmul_args,
        _grouped_matmul_reference),
    "gmm-jit": Program(
        f"{_GMM} in jit", _jitted_grouped_matmul, _grouped_matmul_args,
        lambda x, layers: _grouped_matmul_reference(x, layers[:1])[0]),
    "callback-jit": Program(
        f"{_CALLBACK} in jit", _jitted_searchsorted, _searchsorted_args,
        np.searchsorted, reached=("cpu",)),
    "callback-scan": Program(
        f"{_CALLBACK} in scan", _scanned_searchsorted, _searchsorted_args,
        np.searchsorted, reached=("cpu",)),
    "callback-vmap": Program(
        f"{_CALLBACK} in vmap", _mapped_searchsorted, _searchsorted_args,
        np.searchsorted, reached=("cpu",)),
    "kernel-jit": Program(
        f"{_KERNEL} in jit", _jitted_doubled_by_kernel, _doubled_args,
        _doubled_reference),
    "kernel-export": Program(
        f"{_KERNEL}, exported for cpu and tpu", _jitted_doubled_by_kernel,
        _doubled_args, _doubled_reference, platforms=("cpu", "tpu"),
        reached=("default", "tpu")),
}


# In a child interpreter.

def run_program(program: Program) -> Outcome:
  """Runs a program on the JAX of this interpreter."""
  import jax

  args = program.args()
  jitted = jax.jit(program.fun)
  try:
    if program.platforms == ("cpu",):
      value = program.fun(*args)
      lowered = jitted.lower(*args)
    else:
      from jax import export
      exported = export.export(jitted, platforms=program.platforms)(*args)
      value = exported.call(*args)
      lowered = jitted.trace(*args).lower(lowering_platforms=program.platforms)
    value = np.asarray(value, np.float64)
  except ImportError as error:
    return Outcome(f"not in this JAX: {error}", is_available=False)
  except Exception as error:  # whatever a program raises is its outcome
    return Outcome(f"{type(error).__name__}: {error}")
  reference = program.reference(*args)
  is_right, error_text = False, "another shape than NumPy's"
  if value.shape == reference.shape:
    off_by = np.max(np.abs(value - reference)) / np.max(np.abs(reference))
    is_right, error_text = bool(off_by < 1e-5), f"relative error {off_by:.1g}"
  module = lowered.compiler_ir("stablehlo").operation
  located = module.get_asm(enable_debug_info=True)
  return Outcome(
      f"{'sum' if is_right else 'WRONG: sum'} {value.sum():.7g}, {error_text}",
      is_right=is_right,
      branches=tuple(sorted(set(re.findall(_SCOPE + r"([a-z]+)", located)))),
      module_size=len(lowered.as_text().encode()))


# In the parent.

def run_in_child(name: str, active: bool) -> Outcome:
  """Runs a program in a child interpreter, without or with the package."""
  env = {**os.environ, "JAX_COND_PATCH": str(int(active)),
         "JAX_PLATFORMS": "cpu"}
  child = subprocess.run(
      [sys.executable, "-m", "jax_cond_patch.demo", name], env=env,
      stdin=subprocess.DEVNULL, capture_output=True, text=True)
  if child.returncode:
    last_line = (child.stderr.strip().splitlines() or ["no output"])[-1]
    return Outcome(f"exit status {child.returncode}: {last_line}")
  outcome = json.loads(child.stdout.splitlines()[-1])
  branches = outcome.pop("branches")
  return Outcome(**outcome, branches=None if branches is None
                 else tuple(branches))


def _row(when: str, result: str, branches: object, size: object) -> str:
  return f"  {when:<6}  {result:<53} {branches:>8} {size:>7}"


def _outcome_row(when: str, outcome: Outcome) -> str:
  def shown(x):
    return "-" if x is None else x
  return _row(when, textwrap.shorten(outcome.result, 53, placeholder=" ..."),
              shown(outcome.branches and len(outcome.branches)),
              shown(outcome.module_size))


def main() -> int:
  """Prints the table, and returns 0 if every program is right afterwards."""
  found = releases.installed()
  if found is None or releases.find(found) is None:
    print(f"JAX {found} is not supported; supported are "
          f"{releases.supported()}.", file=sys.stderr)
    return 1
  switches = {"before": False, "after": True}
  jobs = [(name, when) for name in PROGRAMS for when in switches]
  outcomes = {}
  print(f"Running {len(jobs)} child interpreters ...", file=sys.stderr,
        flush=True)
  with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as executor:
    running = {executor.submit(run_in_child, name, switches[when]): (name, when)
               for name, when in jobs}
    for done in futures.as_completed(running):
      name, when = running[done]
      outcomes[name, when] = done.result()
      print(f"[{len(outcomes)}/{len(jobs)}] {PROGRAMS[name].title}: {when}",
            file=sys.stderr, flush=True)

  print(f"JAX {found} on the CPU, before and after `import jax_cond_patch`. "
        "Errors are\nrelative to NumPy; branches and bytes are what is in the "
        "StableHLO module.\n")
  print(_row("", "result", "branches", "bytes"))
  wrong, num_available = [], 0
  for name, program in PROGRAMS.items():
    print(program.title)
    for when in switches:
      print(_outcome_row(when, outcomes[name, when]))
    after = outcomes[name, "after"]
    num_available += after.is_available
    if after.is_available and (
        not after.is_right or after.branches != program.reached):
      wrong.append(f"{program.title}: {after.result}")
  print(f"\n{num_available - len(wrong)} of {num_available} programs are right "
        "with the package.")
  if num_available < len(PROGRAMS):
    print(f"{len(PROGRAMS) - num_available} more can run on newer releases of "
          "JAX.")
  for line in wrong:
    print(f"Not right: {line}")
  return 1 if wrong else 0


def _child_main(argv: Sequence[str]) -> None:
  (name,) = argv
  print(json.dumps(dataclasses.asdict(run_program(PROGRAMS[name]))))


if __name__ == "__main__":
  _child_main(sys.argv[1:])
