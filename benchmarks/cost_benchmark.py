"""Measures what platform conditionals cost: `nox -s benchmarks`.

In each round a program is measured three times, one after the other: called
directly and with branches, both without the package, and with branches and the
package. What pytest-benchmark shows is the last; the others are its
`extra_info`, from which `report.py` makes ratios. It is processor time that is
measured, since the machine may do other things as well.
"""
import functools
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time

import jax
import pytest

import jax_cond_patch
import programs

PHASES = ("trace", "lower", "compile", "first call")


def _cases(transformation, branches, sites, phases=PHASES[:2], rounds=3,
           layers="equal"):
  # By so little does lowering differ that it takes more rounds to see.
  return [pytest.param(
      transformation, layers, branches, sites, phase,
      5 * rounds if phase == "lower" else rounds,
      id=f"{transformation}-{layers}-{branches}-{sites}-{phase}")
          for phase in phases]


CASES = list(itertools.chain(
    *(_cases(t, 4, 10, (*PHASES, "export")) for t in ("forward", "gradient")),
    *(_cases(t, 4, 10) for t in ("vmap", "scan", "remat", "nested")),
    *(_cases(t, n, 10) for t in ("forward", "gradient") for n in (1, 8)),
    *(_cases(t, 4, 60, rounds=5, layers=layers)
      for t in ("forward", "gradient") for layers in programs.LAYERS),
    *(_cases(t, 4, n, rounds=3 if n < 1000 else 1)
      for t in ("forward", "gradient") for n in (100, 1000)),
    _cases("ordinary", 4, 10, PHASES, rounds=7)))


def make(transformation, layers, branches):
  """Returns a program with conditionals, and one that calls directly."""
  if transformation == "ordinary":
    return (programs.switches(branches),) * 2
  if transformation == "nested":
    return (programs.nested(programs.model(branches, layers)),
            programs.direct(branches, layers))
  transform = programs.TRANSFORMATIONS[transformation]
  return (transform(programs.model(branches, layers)),
          transform(programs.direct(branches, layers)))


def prepare(phase, f, args, traced=None):
  """Does what comes before a phase, and returns the phase.

  Args:
    phase: one of `PHASES`, or "export".
    f: the program.
    args: its arguments.
    traced: the program if it has been traced, so that this is not done again.
  """
  f = jax.jit(functools.partial(f))
  if phase == "trace":
    return lambda: f.trace(*args)
  if phase == "export":
    return lambda: programs.exported(f, *args)
  if phase == "first call":
    return lambda: jax.block_until_ready(f(*args))
  traced = traced or f.trace(*args)
  if phase == "lower":
    return traced.lower
  return traced.lower().compile


def arguments(sites, size=16):
  x = programs.X[:size, :size]
  return x, [x] * sites, x[0]


def seconds(function):
  gc.disable()  # as pytest-benchmark does
  try:
    start = time.process_time()
    function()
    return time.process_time() - start
  finally:
    gc.enable()


@pytest.fixture(autouse=True)
def patched_afterwards():
  yield
  jax_cond_patch.activate()


@pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
@pytest.mark.parametrize(
    "transformation,layers,branches,sites,phase,rounds", CASES)
def test_cost(
    benchmark, transformation, layers, branches, sites, phase, rounds):
  branchy, direct = make(transformation, layers, branches)
  args = arguments(sites)
  times = dict(direct=[], unpatched=[])

  def trace(switch, f):
    switch()
    jax.clear_caches()
    return jax.jit(functools.partial(f)).trace(*args)

  programs_by_name = dict(
      direct=(jax_cond_patch.deactivate, direct),
      unpatched=(jax_cond_patch.deactivate, branchy),
      patched=(jax_cond_patch.activate, branchy))
  traced = {name: trace(*program) for name, program in programs_by_name.items()
            } if phase == "lower" else {}

  def prepared(name):
    # JAX's own functions are not measured, and each program finds its caches
    # alike. Of another size, so that nothing that is measured has been done.
    switch, f = programs_by_name[name]
    switch()
    jax.clear_caches()
    for g in (branchy, direct):
      prepare(phase, g, arguments(1, size=8))()
    return prepare(phase, f, args, traced.get(name))

  def setup():
    for name, measured in times.items():
      measured.append(seconds(prepared(name)))
    return (prepared("patched"),), {}

  benchmark.pedantic(lambda run: run(), setup=setup, rounds=rounds)
  benchmark.extra_info.update(
      transformation=transformation, layers=layers, branches=branches,
      sites=sites, phase=phase, jax=jax.__version__,
      **{name: statistics.median(measured) for name, measured in times.items()})
  if phase in ("lower", "export"):
    for name, f, switch in (
        ("direct", direct, jax_cond_patch.deactivated),
        ("unpatched", branchy, jax_cond_patch.deactivated),
        ("patched", branchy, jax_cond_patch.activated)):
      with switch():
        program = jax.jit(lambda *args: f(*args))
        text = (programs.exported(program, *args) if phase == "export" else
                program.lower(*args).as_text())
      benchmark.extra_info[f"{name} operations"] = text.count(" = ")
      benchmark.extra_info[f"{name} bytes"] = len(text)


@pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
@pytest.mark.parametrize("layers", [10, 100])
def test_helper_of_layers(benchmark, layers):
  """A model in branches, for several platforms, lowers its helper once each."""
  program = programs.make_shared_helper(layers)
  jax_cond_patch.activate()
  text = benchmark.pedantic(
      lambda: programs.exported(lambda x: program(x), programs.X), rounds=3)
  helpers = text.count("stablehlo.sine")
  benchmark.extra_info.update(helpers=helpers, bytes=len(text))
  # One for each of the sets of platforms for which a part is lowered.
  assert helpers <= 6


@pytest.mark.benchmark(timer=time.process_time)
def test_activation(benchmark):
  benchmark.pedantic(
      jax_cond_patch.activate, setup=jax_cond_patch.deactivate, rounds=10)
  benchmark.extra_info.update(
      activation=benchmark.stats["median"], jax=jax.__version__)


@pytest.mark.benchmark(warmup=False)
def test_import(benchmark):
  """What `import jax_cond_patch` adds to `import jax`, in its own process."""
  program = ("import time, jax, jax.numpy; start = time.process_time(); "
             "import jax_cond_patch; print(time.process_time() - start)")
  added = []
  # As everywhere, but where this is set, the first import leaves bytecode.
  env = {name: value for name, value in os.environ.items()
         if name != "PYTHONDONTWRITEBYTECODE"}

  def run():
    added.append(float(subprocess.check_output(
        [sys.executable, "-c", program], text=True, env=env)))

  benchmark.pedantic(run, rounds=5, warmup_rounds=1)
  benchmark.extra_info.update(
      added=statistics.median(added), jax=jax.__version__)
