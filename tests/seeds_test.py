"""The programs from which this project began, as their authors wrote them.

https://github.com/jax-ml/jax/issues/28594 and the question how to delegate to
a function of one's own on a CPU.
"""
from functools import partial
import inspect

from absl.testing import absltest
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

import jax_cond_patch  # noqa: F401 (activates)
import jcp_test_util as tu

try:
  from jax.experimental.pallas.ops.tpu.megablox import gmm
except ImportError:
  gmm = None

config.parse_flags_with_absl()


def grouped_matmul(x, weights, group_sizes):
  """`gmm` in float64: each group of rows times its own matrix."""
  starts = np.concatenate([[0], np.cumsum(group_sizes)])
  return np.concatenate([
      np.asarray(x, np.float64)[a:b] @ np.asarray(w, np.float64)
      for a, b, w in zip(starts, starts[1:], weights)])


@tu.requires("megablox")
class GroupedMatmulTest(tu.JcpTestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.RandomState(42)
    self.x = rng.randn(128, 128).astype(np.float32)
    self.weights = (rng.randn(3, 2, 128, 128) / 12).astype(np.float32)
    self.group_sizes = np.array([60, 68], np.int32)

  def layer(self, x, weight):
    out = lax.platform_dependent(
        x, weight, jnp.asarray(self.group_sizes),
        tpu=partial(gmm, interpret=False),
        default=partial(gmm, interpret=True))
    return out, out

  @jtu.run_on_devices("cpu")
  def test_gmm_in_scan(self):
    last, outs = lax.scan(self.layer, self.x, self.weights)
    expected = self.x
    for out, weight in zip(outs, self.weights):
      expected = grouped_matmul(expected, weight, self.group_sizes)
      np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(last, expected, rtol=1e-3, atol=1e-3)

  @jtu.run_on_devices("cpu")
  def test_gmm_in_jit(self):
    out, _ = jax.jit(self.layer)(self.x, self.weights[0])
    np.testing.assert_allclose(
        out, grouped_matmul(self.x, self.weights[0], self.group_sizes),
        rtol=1e-3, atol=1e-3)

  @tu.requires("tpu_kernels")
  def test_gmm_for_tpu(self):
    text = tu.lower(lambda x, ws: lax.scan(self.layer, x, ws), self.x,
                    self.weights, platforms=("tpu",))
    self.assertEqual(text.count("stablehlo.custom_call @tpu_custom_call"), 1)


class SeedsTest(tu.JcpTestCase):

  @jtu.run_on_devices("cpu")
  def test_kernel_beside_its_reference(self):
    branch = partial(pl.pallas_call, lambda x_ref, o_ref: None,
                     out_shape=jax.ShapeDtypeStruct((), jnp.int32))
    f = lambda x: lax.platform_dependent(
        x, tpu=lambda x: branch(interpret=False)(x),
        default=lambda x: jnp.zeros((), jnp.int32) + x.astype(jnp.int32))
    self.assertEqual(jax.jit(f)(3.), 3)

  @jtu.run_on_devices("cpu")
  def test_numpy_on_the_cpu(self):
    def func_cpu(a, v):
      def on_host(a, v):
        a, v = np.asarray(a), np.asarray(v)
        a = np.broadcast_to(a, (*v.shape[:-1], a.shape[-1]))
        return np.stack([np.searchsorted(a_, v_) for a_, v_ in zip(
            a.reshape(-1, a.shape[-1]), v.reshape(-1, v.shape[-1]))]).reshape(
                v.shape).astype(np.int32)
      shape = jax.ShapeDtypeStruct(v.shape, np.int32)
      if "vmap_method" in inspect.signature(jax.pure_callback).parameters:
        return jax.pure_callback(on_host, shape, a, v,
                                 vmap_method="broadcast_all")
      # Up to JAX 0.4.33 it broadcasts nothing.
      return jax.pure_callback(on_host, shape, a, v, vectorized=True)

    def func_gpu(a, v):
      return jnp.searchsorted(a, v, method="sort").astype(np.int32)

    def func(a, v):
      return lax.platform_dependent(a, v, cpu=func_cpu, cuda=func_gpu)

    a = np.sort(np.random.RandomState(0).rand(16)).astype(np.float32)
    v = np.linspace(0, 1, 7, dtype=np.float32)
    expected = np.searchsorted(a, v).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(func)(a, v), expected)
    np.testing.assert_array_equal(
        lax.scan(lambda c, v: (c, func(a, v)), 0, np.stack([v, v]))[1],
        [expected, expected])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(func, (None, 0)))(a, np.stack([v, v])),
        [expected, expected])
    text = tu.lower(func, a, v, platforms=("cuda",))
    self.assertNotIn("callback", text)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
