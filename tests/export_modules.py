"""Writes a module into tests/modules, for JAX's later releases to read.

  python tests/export_modules.py            with the package
  JAX_COND_PATCH=0 python tests/export_modules.py

`OlderModulesTest` in faults_test.py reads what was written with some releases.
"""
import pathlib

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

import jax_cond_patch

FOLDER = pathlib.Path(__file__).parent / "modules"
PLATFORMS = ("cpu", "tpu", "cuda")


def layer(x, w):
  return lax.platform_dependent(
      x, w, cpu=lambda x, w: jnp.tanh(x @ w), tpu=lambda x, w: jnp.sin(x @ w),
      default=lambda x, w: x @ w)


def layers(x, w):
  """Three layers: x [4], weights [4, 4] -> x [4]."""
  return lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0]


def main():
  x = jax.ShapeDtypeStruct((4,), jnp.float32)
  w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  exported = export.export(jax.jit(layers), platforms=PLATFORMS)(x, w)
  by = "package" if jax_cond_patch.is_active() else "jax"
  (FOLDER / f"{jax.__version__}-{by}.bin").write_bytes(
      exported.serialize(vjp_order=1))


if __name__ == "__main__":
  main()
