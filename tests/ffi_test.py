"""Tests of a real kernel in C++ for one platform beside one for another."""
import ctypes
import os
import shutil
import subprocess
import tempfile
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
import jax.numpy as jnp
import numpy as np

import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32)

KERNEL = """
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

ffi::Error ScaleImpl(float factor, ffi::Buffer<ffi::F32> x,
                     ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i) {
    y->typed_data()[i] = x.typed_data()[i] * factor;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Scale, ScaleImpl,
    ffi::Ffi::Bind()
        .Attr<float>("factor")
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>());
"""

# It is registered for the CPU; there is no other.
HERE = "jcp_test_scale"
ELSEWHERE = "jcp_test_scale_cuda"


def call(target: str, x):
  return jax.ffi.ffi_call(
      target, jax.ShapeDtypeStruct(x.shape, x.dtype),
      vmap_method="broadcast_all")(x, factor=np.float32(3))


@jax.custom_vjp
def scale(x):
  return lax.platform_dependent(
      x, cpu=lambda x: call(HERE, x), cuda=lambda x: call(ELSEWHERE, x),
      default=lambda x: x * 3)


scale.defvjp(lambda x: (scale(x), None), lambda _, ct: (scale(ct),))


def raw_scale(x):
  """As `scale`, but a kernel alone has no derivative."""
  return lax.platform_dependent(
      x, cuda=lambda x: call(ELSEWHERE, x), default=lambda x: x * 3)


PROGRAMS = dict(
    jit=(jax.jit(scale), lambda x: x * 3),
    scan=(lambda x: lax.scan(
        lambda c, _: (scale(c), None), x, None, length=2)[0], lambda x: x * 9),
    vmap=(lambda x: jax.vmap(scale)(jnp.stack([x, x]))[1], lambda x: x * 3),
    scan_of_vmap=(lambda x: lax.scan(
        lambda c, _: (jax.vmap(scale)(c[None])[0], None), x, None,
        length=2)[0], lambda x: x * 9),
    grad=(jax.grad(lambda x: (scale(x) ** 2).sum()), lambda x: x * 18),
    grad_in_scan=(jax.grad(lambda x: lax.scan(
        lambda c, _: (jax.checkpoint(scale)(c), None), x, None,
        length=2)[0].sum()), lambda x: x * 0 + 9),
    grad_without_rule=(jax.grad(lambda x: raw_scale(x).sum()),
                       lambda x: x * 0 + 3),
)


@tu.requires("ffi")
class FfiTest(tu.JcpTestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
      raise unittest.SkipTest("There is no C++ compiler on this machine.")
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    source = os.path.join(folder, "kernel.cc")
    with open(source, "w") as f:
      f.write(KERNEL)
    library = os.path.join(folder, "kernel.so")
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-O1",
         f"-I{jax.ffi.include_dir()}", "-o", library, source], check=True)
    cls.library = ctypes.cdll.LoadLibrary(library)
    jax.ffi.register_ffi_target(
        HERE, jax.ffi.pycapsule(cls.library.Scale), platform="cpu")

  @parameterized.parameters(*PROGRAMS)
  @jtu.run_on_devices("cpu")
  def test_runs(self, name):
    f, expected = PROGRAMS[name]
    self.assertAllClose(jax.jit(f)(X), expected(X))
    self.assertAllClose(f(X), expected(X))

  @parameterized.product(
      name=list(PROGRAMS),
      platforms=[("cpu",), ("cuda",), ("tpu",), ("cpu", "tpu"),
                 ("cuda", "cpu", "tpu")])
  @jtu.run_on_devices("cpu")
  def test_export(self, name, platforms):
    f, expected = PROGRAMS[name]
    from jax import export  # It is not where there is no `jax.ffi`.
    allow = export.DisabledSafetyCheck.custom_call
    exporter = export.export(
        jax.jit(f), platforms=platforms,
        disabled_checks=[allow(HERE), allow(ELSEWHERE)])
    if name == "grad_without_rule" and "cuda" in platforms:
      with self.assertRaisesRegex(Exception, "cannot be differentiated"):
        exporter(X)
      return
    exported = exporter(X)
    text = exported.mlir_module()
    has = {p: f'@{target}(' in text or f'"{target}"' in text
           for p, target in (("cpu", HERE), ("cuda", ELSEWHERE))}
    self.assertEqual(has["cuda"], "cuda" in platforms, text)
    self.assertEqual(has["cpu"], "cpu" in platforms and
                     name != "grad_without_rule", text)
    again = export.deserialize(exported.serialize())
    for platform in set(platforms) - {"cuda"}:
      self.assertAllClose(tu.run_as(again, platform, X), expected(X))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
