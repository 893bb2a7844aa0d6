"""Tests of platform conditionals in the bodies of Pallas kernels.

What a kernel is lowered to is printed by `debug=True`; no device is needed.
That is as far as these tests go: what the compilers of Mosaic and Triton make
of it, and what it computes there, only such a device shows.
"""
import contextlib
import inspect
import io
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

import jcp_test_util as tu

try:
  from jax.experimental.pallas import mosaic_gpu as plgpu
  from jax.experimental.pallas import triton as pltriton
except ImportError:  # up to JAX 0.4.34
  plgpu = pltriton = None

config.parse_flags_with_absl()

X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
OUT = jax.ShapeDtypeStruct(X.shape, X.dtype)

BRANCHES = dict(cpu=1.5, cuda=2.5, rocm=3.5, tpu=4.5, mosaic=5.5,
                mosaic_gpu=6.5, triton=7.5)
DEFAULT = 8.5


def add(constant):
  return lambda x: x + np.float32(constant)


def choose(x, *names):
  """Adds the constant of one of the branches with these names, or DEFAULT."""
  return lax.platform_dependent(
      x, **{name: add(BRANCHES[name]) for name in names}, default=add(DEFAULT))


def kernel(*names):
  def kernel_(x_ref, o_ref):
    o_ref[...] = choose(x_ref[...], *names)
  return kernel_


def params(module):
  """The params by which a kernel says that it is for the GPU."""
  names = ("CompilerParams", "GPUCompilerParams", "TritonCompilerParams")
  return next(getattr(module, n) for n in names if hasattr(module, n))()


def tpu_interpreter():
  if hasattr(pltpu, "InterpretParams"):
    return pltpu.InterpretParams()
  # Up to JAX 0.6.2 it is no public name, up to JAX 0.6.1 another one.
  from jax._src.pallas.mosaic import interpret
  return getattr(interpret, "TPUInterpretParams",
                 getattr(interpret, "InterpretParams", None))()


def pallas_call(kernel, out_shape=OUT, **kwargs):
  return pl.pallas_call(kernel, out_shape=out_shape, **kwargs)


def on_abstract_device(platform):
  """Since JAX 0.10.2 kernels may ask for their device, or an abstract one."""
  device_type = getattr(jax.sharding, "AbstractDevice", None)
  if (device_type is None or
      "platform" not in inspect.signature(device_type).parameters):
    return contextlib.nullcontext()
  if platform == "tpu":
    device = device_type("TPU v5 lite", num_cores=1, platform="tpu")
  else:
    device = device_type(
        "NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
  return jax.sharding.use_abstract_mesh(
      jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def lowered(language, platform, kernel, **kwargs):
  """What a kernel is lowered to, printed."""
  if language == "mosaic":
    call = pallas_call(kernel, debug=True, **kwargs)
  elif language == "triton":
    if pltriton is not None:
      kwargs["compiler_params"] = params(pltriton)
    call = pallas_call(kernel, debug=True, **kwargs)
  elif (hasattr(plgpu, "kernel") and
        "debug" in inspect.signature(plgpu.kernel).parameters):
    call = plgpu.kernel(kernel, debug=True, out_type=OUT, **kwargs)
  else:
    if "backend" in inspect.signature(pl.pallas_call).parameters:
      kwargs["backend"] = "mosaic_gpu"
    call = pallas_call(kernel, debug=True, compiler_params=params(plgpu),
                       **kwargs)
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), on_abstract_device(platform):
    tu.lower(call, X, platforms=(platform,))
  # The jaxpr of the user comes first.
  text = printed.getvalue()
  return text[re.search(r"^\s*(module|.*func\.func)", text, re.M).start():]


def constants(text):
  return sorted({float(x) for x in re.findall(r"\b\d\.5(?=0*e|\b)", text)})


def without_locations(text):
  """What is no line, and no number of a kernel, in printed MLIR."""
  text = re.sub(r"^#loc.*\n", "", text, flags=re.M)
  # As MLIR writes them, and in its pretty form.
  text = re.sub(r' ?\bloc\((?:[^()]|\([^()]*\))*\)|"[^"]*"\(#loc\d+\)|#loc\d+',
                "", text)
  text = re.sub(r"^ at \n", "", text, flags=re.M)
  return re.sub(r'dump_basename = "\w+"', "", text)


def named(fun):
  """Kernels are named after their functions."""
  def kernel(x_ref, o_ref):
    fun(x_ref, o_ref)
  return kernel


LANGUAGES = (("mosaic", "tpu"), ("triton", "cuda"), ("triton", "rocm"),
             ("mosaic_gpu", "cuda"))


REQUIRED = dict(mosaic="tpu_kernels", triton="triton_kernels",
                mosaic_gpu="mosaic_gpu_kernels")


class KernelTest(tu.JcpTestCase):

  def lowered(self, language, platform, kernel, **kwargs):
    self.requires(REQUIRED[language])
    return lowered(language, platform, kernel, **kwargs)

  def interpreter(self, name):
    if name == "any":
      return True
    self.requires("tpu_interpreter")
    return tpu_interpreter()

  @parameterized.parameters(*LANGUAGES)
  def test_language_picks_the_branch(self, language, platform):
    text = self.lowered(language, platform, kernel(*BRANCHES))
    self.assertEqual(constants(text), [BRANCHES[language]])

  @parameterized.parameters(*LANGUAGES)
  def test_kernel_is_that_of_the_branch(self, language, platform):
    def direct(x_ref, o_ref):
      o_ref[...] = add(BRANCHES[language])(x_ref[...])
    self.assertMultiLineEqual(
        without_locations(self.lowered(language, platform, named(
            kernel(*BRANCHES)))),
        without_locations(self.lowered(language, platform, named(direct))))

  @tu.requires("mosaic_gpu_kernels")
  def test_resources_of_the_branch(self):
    """What other branches would need is not asked for."""
    def with_scratch(factor):
      def branch(x_ref, o_ref):
        def scoped(scratch_ref):
          scratch_ref[:8, :] = x_ref[...]
          o_ref[...] = scratch_ref[:8, :]
        pl.run_scoped(scoped, plgpu.SMEM((8 * factor, 128), X.dtype))
      return branch
    def kernel(x_ref, o_ref):
      lax.platform_dependent(
          mosaic_gpu=lambda: with_scratch(2)(x_ref, o_ref),
          default=lambda: with_scratch(1000)(x_ref, o_ref))
    self.assertMultiLineEqual(*(
        without_locations(self.lowered("mosaic_gpu", "cuda", named(k)))
        for k in (kernel, with_scratch(2))))

  @parameterized.parameters(*LANGUAGES)
  def test_default_branch(self, language, platform):
    text = self.lowered(language, platform, kernel("cpu"))
    self.assertEqual(constants(text), [DEFAULT])

  @parameterized.parameters(*LANGUAGES[1:])
  def test_platform_picks_the_branch_on_gpus(self, language, platform):
    text = self.lowered(
        language, platform, kernel("cpu", "cuda", "rocm", "mosaic"))
    self.assertEqual(constants(text), [BRANCHES[platform]])

  def test_platform_does_not_pick_the_branch_on_tpus(self):
    """As in JAX, where "mosaic" does so."""
    text = self.lowered("mosaic", "tpu", kernel("cpu", "tpu"))
    self.assertEqual(constants(text), [DEFAULT])

  @parameterized.parameters(*LANGUAGES)
  def test_no_branch(self, language, platform):
    def kernel(x_ref, o_ref):
      o_ref[...] = lax.platform_dependent(
          x_ref[...], cpu=add(1.5), other=add(2.5))
    with self.assertRaisesRegex(
        NotImplementedError,
        f"no branch for '{language}'.*'cpu', 'other'.*pallas_test.py"):
      self.lowered(language, platform, kernel)

  @parameterized.parameters(*LANGUAGES)
  def test_references_in_branches(self, language, platform):
    def kernel(x_ref, o_ref):
      def write(constant):
        def write():
          o_ref[...] = x_ref[...] + np.float32(constant)
        return write
      lax.platform_dependent(
          **{name: write(BRANCHES[name]) for name in BRANCHES},
          default=write(DEFAULT))
    text = self.lowered(language, platform, kernel)
    self.assertEqual(constants(text), [BRANCHES[language]])

  @parameterized.product(
      target=LANGUAGES, inside=("fori", "cond", "jit", "nested", "scoped"))
  def test_inside(self, target, inside):
    language, platform = target
    if (language, inside) == ("triton", "scoped"):
      self.skipTest("Triton has no run_scoped.")
    if (language, inside) == ("mosaic_gpu", "cond"):
      self.requires("mosaic_gpu_conditionals_of_arrays")
    def body(x):
      return choose(x, *BRANCHES)
    def kernel(x_ref, o_ref):
      x = x_ref[...]
      if inside == "fori":
        # Old Triton takes no loop without the index.
        x = lax.fori_loop(
            0, 3, lambda i, x: body(x) + i.astype(x.dtype), x)
      elif inside == "cond":
        x = lax.fori_loop(0, 3, lambda i, x: lax.cond(
            i > 0, body, lambda x: x, x), x)
      elif inside == "jit":
        x = jax.jit(body)(x)
      elif inside == "nested":
        x = lax.platform_dependent(x, cpu=add(1.5), default=body)
      else:
        memory = plgpu.SMEM if language == "mosaic_gpu" else pltpu.VMEM
        def scoped(scratch_ref):
          scratch_ref[...] = body(x)
          o_ref[...] = scratch_ref[...]
        # Up to JAX 0.4.30 it is for TPUs.
        module = pl if hasattr(pl, "run_scoped") else pltpu
        module.run_scoped(scoped, memory(x.shape, x.dtype))
        return
      o_ref[...] = x
    text = self.lowered(language, platform, kernel)
    self.assertEqual(constants(text), [BRANCHES[language]])

  @tu.requires("platform_dependent_diagonal")
  def test_diagonal(self):
    """It is platform dependent itself, with a branch for "mosaic"."""
    def kernel(x_ref, o_ref):
      o_ref[...] = jnp.broadcast_to(jnp.diag(x_ref[...][:, :8]), (8, 8))
    x = X[:, :8]
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(
        (8, 8), X.dtype), interpret=True)
    self.assertAllClose(call(x), np.broadcast_to(np.diag(x), (8, 8)))
    self.assertNotIn("case", self.lowered(
        "mosaic", "tpu", kernel, out_shape=jax.ShapeDtypeStruct(
            (8, 8), X.dtype)))

  def test_dead_operands(self):
    """What only other branches need is gone."""
    def kernel(x_ref, o_ref):
      x = x_ref[...]
      o_ref[...] = lax.platform_dependent(
          x, x * 1.5, mosaic=lambda x, y: x, default=lambda x, y: y)
    self.assertEmpty(constants(self.lowered("mosaic", "tpu", kernel)))
    self.assertEqual(constants(self.lowered("triton", "cuda", kernel)), [1.5])

  def test_index_map(self):
    x = np.concatenate([X, -X])
    def kernel(x_ref, o_ref):
      o_ref[...] = x_ref[...]
    def index_map(i):
      return lax.platform_dependent(
          i, mosaic=lambda i: (i, 0), default=lambda i: (1 - i, 0))
    def call(interpret):
      return pallas_call(
          kernel, grid=(2,), in_specs=[pl.BlockSpec(
              block_shape=X.shape, index_map=index_map)],
          out_specs=pl.BlockSpec(
              block_shape=X.shape, index_map=lambda i: (i, 0)),
          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)
    self.assertAllClose(call(True)(x), np.concatenate([-X, X]))
    if tu.has("tpu_kernels"):
      self.assertIn(
          "custom_call", tu.lower(call(False), x, platforms=("tpu",)))

  @parameterized.parameters("any", "tpu")
  def test_interpreted(self, interpreter):
    """The platform picks the branch, as the operations are for that."""
    interpret = self.interpreter(interpreter)
    def call(kernel):
      return pallas_call(kernel, interpret=interpret)
    self.assertAllClose(call(kernel(*BRANCHES))(X), X + np.float32(1.5))
    text = tu.lower(call(kernel(*BRANCHES)), X, platforms=("cpu",))
    self.assertEqual(constants(text), [BRANCHES["cpu"]])
    def direct(x_ref, o_ref):
      o_ref[...] = add(1.5)(x_ref[...])
    self.assertEqual(
        tu.count_ops(text, "stablehlo.case"), tu.count_ops(
            tu.lower(call(direct), X, platforms=("cpu",)), "stablehlo.case"))

  @tu.requires("gpu_interpreter")
  def test_interpreted_as_on_a_gpu(self):
    parameters = inspect.signature(plgpu.kernel).parameters
    out = "out_type" if "out_type" in parameters else "out_shape"
    call = plgpu.kernel(kernel(*BRANCHES), **{out: OUT},
                        interpret=plgpu.InterpretGPUParams())
    self.assertAllClose(call(X), X + np.float32(1.5))
    text = tu.lower(call, X, platforms=("cpu",))
    self.assertEqual(constants(text), [BRANCHES["cpu"]])

  @parameterized.parameters("any", "tpu")
  def test_interpreted_references_in_branches(self, interpreter):
    def kernel(x_ref, o_ref):
      def write(constant):
        def write():
          o_ref[...] = x_ref[...] + np.float32(constant)
        return write
      def write_on_cuda():
        o_ref[...] = tu.only_on("cuda")(x_ref[...])
      lax.platform_dependent(
          cpu=write(1.5), cuda=write_on_cuda, default=write(2.5))
    call = pallas_call(kernel, interpret=self.interpreter(interpreter))
    self.assertAllClose(jax.jit(call)(X), X + np.float32(1.5))

  @tu.requires("interpreted_kernels_for_several_platforms")
  def test_interpreted_in_a_module_for_several_platforms(self):
    call = pallas_call(kernel("cuda"), interpret=True)
    self.assertRunsAs(call, dict(cpu=add(DEFAULT), cuda=add(2.5),
                                 tpu=add(DEFAULT)), X)
    same = pallas_call(kernel("rocm"), interpret=True)
    def direct(x_ref, o_ref):
      o_ref[...] = add(DEFAULT)(x_ref[...])
    platforms = ("cpu", "cuda", "tpu")
    self.assertEqual(
        tu.count_ops(tu.lower(same, X, platforms=platforms), "stablehlo.case"),
        tu.count_ops(tu.lower(pallas_call(direct, interpret=True), X,
                              platforms=platforms), "stablehlo.case"))

  @tu.requires("package")
  @tu.requires("tpu_kernels")
  def test_kernel_for_several_platforms(self):
    """Each has the kernel of its own language."""
    printed = io.StringIO()
    call = pallas_call(kernel(*BRANCHES), debug=True)
    with contextlib.redirect_stdout(printed), on_abstract_device("cuda"):
      lowered = jax.jit(call).trace(X).lower(lowering_platforms=("tpu", "cuda"))
    self.assertEqual(tu.count_ops(lowered.as_text(), "stablehlo.case"), 1)
    gpu = "triton" if "triton" in lowered.as_text() else "mosaic_gpu"
    self.assertIn("tpu_custom_call", lowered.as_text())
    self.assertEqual(
        constants(printed.getvalue().split("module", 1)[1]),
        sorted([BRANCHES["mosaic"], BRANCHES[gpu]]))

  @parameterized.parameters("vmap", "jvp", "vmap_jvp")
  def test_transformed(self, name):
    def f(x):
      return pallas_call(kernel("cpu"), interpret=True)(x)
    jvp = lambda x: jax.jvp(f, (x,), (2 * x,))[1]
    g, x, expected = dict(
        vmap=(jax.vmap(f), np.stack([X, -X]), np.stack([X, -X]) + 1.5),
        jvp=(jvp, X, 2 * X),
        vmap_jvp=(jax.vmap(jvp), np.stack([X, -X]), 2 * np.stack([X, -X])),
    )[name]
    with config.enable_checks(tu.has("checked_derivatives_of_kernels")):
      self.assertAllClose(jax.jit(g)(x), expected.astype(np.float32))
      self.assertNotIn("stablehlo.case", tu.lower(g, x, platforms=("cpu",)))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
