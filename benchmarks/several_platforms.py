"""Measures modules for several platforms: layers share their helper.

  python benchmarks/several_platforms.py [LAYERS ...]

Prints, for a model of so many layers in two branches and in a lowering rule,
how often the helper of the layers stands in the module, the size of the text,
and how long lowering takes; with the package and without it. With it there is
one for each of the five sets of platforms for which a part of the program is
lowered; without it these share, which gives wrong numbers.
"""
import sys
import time

import jax
from jax import export
from jax import lax
from jax._src import core
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

import jax_cond_patch

PLATFORMS = ("cpu", "cuda", "tpu")


def make_program(layers: int):
  @jax.jit
  def helper(x):
    return jnp.sin(x) + lax.platform_dependent(
        x, tpu=lambda x: x * 2., default=lambda x: x * 3.)

  def model(x):
    for _ in range(layers):
      x = helper(x)
    return x

  primitive = core.Primitive("benchmark_model")
  primitive.def_abstract_eval(lambda x: x)
  rule = mlir.lower_fun(model, multiple_results=False)
  mlir.register_lowering(primitive, rule)
  mlir.register_lowering(primitive, rule, platform="cpu")

  def program(x):
    return lax.platform_dependent(
        model(x), tpu=lambda x: model(x),
        default=lambda x: model(primitive.bind(x)))
  return program


def measure(layers: int) -> str:
  x = np.ones(8, np.float32)
  program = make_program(layers)
  start = time.perf_counter()
  module = export.export(
      jax.jit(program), platforms=PLATFORMS)(x).mlir_module()
  seconds = time.perf_counter() - start
  return (f"{module.count('stablehlo.sine'):8}{len(module) / 1024:9.0f}"
          f"{seconds:10.2f}")


def main() -> None:
  print(f"jax {jax.__version__}, for {', '.join(PLATFORMS)}")
  print(f"{'':10}{'layers':>8}{'helpers':>8}{'KiB':>9}{'seconds':>10}")
  for layers in map(int, sys.argv[1:] or (10, 100)):
    for name, context in (("unpatched", jax_cond_patch.deactivated),
                          ("patched", jax_cond_patch.activated)):
      with context():
        measure(1)  # JAX's own first use of its parts is not measured.
        print(f"{name:10}{layers:8}{measure(layers)}")


if __name__ == "__main__":
  main()
