"""Tests of a real kernel in C++ for one platform beside one for another."""
import ctypes
import inspect
import os
import shutil
import subprocess
import tempfile
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.extend
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp
from jaxlib import xla_client
import numpy as np

import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32)

TYPED_KERNEL = """
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::DataType::F32>;

ffi::Error ScaleImpl(float factor, Floats x, ffi::Result<Floats> y) {
  for (size_t i = 0; i < x.element_count(); ++i) {
    y->typed_data()[i] = x.typed_data()[i] * factor;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Scale, ScaleImpl,
    ffi::Ffi::Bind()
        .Attr<float>("factor")
        .Arg<Floats>()
        .Ret<Floats>());
"""

UNTYPED_KERNEL = """
extern "C" void Scale(void* y, const void** x_and_size) {
  const float* x = static_cast<const float*>(x_and_size[0]);
  const int size = *static_cast<const int*>(x_and_size[1]);
  for (int i = 0; i < size; ++i) static_cast<float*>(y)[i] = x[i] * 3;
}
"""

# It is registered for the CPU; there is no other.
HERE = "jcp_test_scale"
ELSEWHERE = "jcp_test_scale_cuda"


def _find_ffi():
  """Finds the typed FFI; there is none up to JAX 0.4.30."""
  for package in (jax, jax.extend):  # up to JAX 0.4.38 the second
    ffi = getattr(package, "ffi", None)
    if hasattr(ffi, "ffi_call"):
      return ffi
  return None


FFI = _find_ffi()


def call(target: str, x):
  if FFI is None:
    return custom_call_p.bind(x, target=target)
  shape, factor = jax.ShapeDtypeStruct(x.shape, x.dtype), np.float32(3)
  if "vmap_method" in inspect.signature(FFI.ffi_call).parameters:
    return FFI.ffi_call(
        target, shape, vmap_method="broadcast_all")(x, factor=factor)
  return FFI.ffi_call(target, shape, x, vectorized=True, factor=factor)


# The untyped call.
custom_call_p = core.Primitive("jcp_test_custom_call")
custom_call_p.def_impl(lambda x, target: jax.jit(
    lambda x: custom_call_p.bind(x, target=target))(x))
custom_call_p.def_abstract_eval(lambda x, target: x)


def _custom_call_lowering(ctx, x, target):
  size = mlir.ir_constant(np.int32(ctx.avals_in[0].size))
  call_op = mlir.custom_call(
      target, operands=[x, size],
      result_types=[mlir.aval_to_ir_type(ctx.avals_out[0])])
  return call_op.results


mlir.register_lowering(custom_call_p, _custom_call_lowering)
batching.primitive_batchers[custom_call_p] = lambda args, dims, target: (
    custom_call_p.bind(*args, target=target), dims[0])


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
      f.write(TYPED_KERNEL if FFI else UNTYPED_KERNEL)
    library = os.path.join(folder, "kernel.so")
    include = [f"-I{FFI.include_dir()}"] if FFI else []
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-O1", *include, "-o",
         library, source], check=True)
    cls.library = ctypes.cdll.LoadLibrary(library)
    if FFI:
      FFI.register_ffi_target(
          HERE, FFI.pycapsule(cls.library.Scale), platform="cpu")
    else:
      new_capsule = ctypes.pythonapi.PyCapsule_New
      new_capsule.restype = ctypes.py_object
      new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
      xla_client.register_custom_call_target(
          HERE, new_capsule(
              ctypes.cast(cls.library.Scale, ctypes.c_void_p),
              b"xla._CUSTOM_CALL_TARGET", None), platform="cpu")

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
    allow = tu.DisabledSafetyCheck.custom_call
    exporter = tu.export(
        jax.jit(f), platforms=platforms,
        disabled_checks=[allow(HERE), allow(ELSEWHERE)])
    if name == "grad_without_rule" and "cuda" in platforms:
      with self.assertRaisesRegex(
          Exception, "cannot be differentiated|Differentiation rule"):
        exporter(X)
      return
    exported = exporter(X)
    text = exported.mlir_module()
    has = {p: f'@{target}(' in text or f'"{target}"' in text
           for p, target in (("cpu", HERE), ("cuda", ELSEWHERE))}
    self.assertEqual(has["cuda"], "cuda" in platforms, text)
    self.assertEqual(has["cpu"], "cpu" in platforms and
                     name != "grad_without_rule", text)
    again = tu.reloaded(exported)
    for platform in set(platforms) - {"cuda"}:
      self.assertAllClose(tu.run_as(again, platform, X), expected(X))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
