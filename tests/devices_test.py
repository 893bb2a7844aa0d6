"""Tests of programs on eight devices."""
from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp
import numpy as np

import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(16, dtype=np.float32).reshape(8, 2) / 8
DEVICES = 8


def choose(x):
  return lax.platform_dependent(
      x, cpu=tu.marked(1.25), tpu=tu.marked(2.25), default=tu.marked(3.25))


def chosen(x):
  return np.sin(x) * np.float32(1.25)


def sums(x):
  """Communicates in some of the branches, in another way in each."""
  return lax.platform_dependent(
      x, cpu=lambda x: x + lax.psum(choose(x), "i"),
      tpu=lambda x: x * 0 + lax.pmax(x, "i"), default=lambda x: x * 2)


def summed(x):
  return x + chosen(x).sum(0)


class DevicesTest(tu.JcpTestCase):

  def setUp(self):
    super().setUp()
    if jax.device_count() < DEVICES:
      self.skipTest(f"There are not {DEVICES} devices; see the class below.")
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("i",))
    self.sharding = NamedSharding(self.mesh, P("i"))

  def mapped(self, f):
    return tu.shard_map(f, mesh=self.mesh, in_specs=P("i"), out_specs=P("i"),
                        check=tu.has("checked_shard_map"))

  def assertNothingElse(self, f, *args):
    text = jax.jit(f).lower(*args).as_text()
    for other in ("2.25", "3.25", "case"):
      self.assertNotIn(other, text)

  @jtu.run_on_devices("cpu")
  def test_shard_map(self):
    f = self.mapped(sums)
    self.assertAllClose(jax.jit(f)(X), summed(X), rtol=1e-5)
    self.assertAllClose(f(X), summed(X), rtol=1e-5)
    self.assertNothingElse(f, X)
    # A map in a branch, and a scan with a map and a branch in it.
    g = lambda x: lax.platform_dependent(
        x, cpu=f, default=lambda x: x + 2.25)
    h = lambda x: lax.scan(lambda c, _: (g(c), None), x, None, length=2)[0]
    self.assertAllClose(jax.jit(h)(X), summed(summed(X)), rtol=1e-4)
    self.assertNothingElse(h, X)

  @jtu.run_on_devices("cpu")
  def test_gradient_of_shard_map(self):
    f = self.mapped(sums)
    # Each row is in its own sum, and in that of all.
    expected = 1 + DEVICES * np.cos(X) * np.float32(1.25)
    grad = jax.grad(lambda x: f(x).sum())
    self.assertAllClose(jax.jit(grad)(X), expected, rtol=1e-4)
    self.assertNothingElse(grad, X)

  @parameterized.parameters("cpu", "tpu", "cuda")
  @jtu.run_on_devices("cpu")
  def test_export(self, platform):
    exported = tu.export(jax.jit(self.mapped(sums)),
                         platforms=("tpu", "cpu", "cuda"))(X)
    x = jax.device_put(X, self.sharding)
    expected = dict(cpu=summed(X), cuda=X * 2,
                    tpu=np.broadcast_to(X.max(0), X.shape))
    self.assertAllClose(
        tu.run_as(exported, platform, x), expected[platform], rtol=1e-5)

  @jtu.run_on_devices("cpu")
  def test_pmap(self):
    f = jax.pmap(sums, axis_name="i")
    self.assertAllClose(np.asarray(f(X)), summed(X), rtol=1e-5)
    grad = jax.pmap(jax.grad(lambda x: choose(x).sum()))
    self.assertAllClose(
        np.asarray(grad(X)), np.cos(X) * np.float32(1.25), rtol=1e-5)

  @jtu.run_on_devices("cpu")
  def test_shardings(self):
    """Outside of a branch, and inside of it."""
    replicated = NamedSharding(self.mesh, P())
    def f(x):
      x = lax.platform_dependent(
          x, cpu=lambda x: lax.with_sharding_constraint(
              tu.marked(1.25)(x), replicated),
          default=lambda x: lax.with_sharding_constraint(
              tu.marked(2.25)(x), self.sharding))
      return jnp.sin(x)
    x = jax.device_put(X, self.sharding)
    for out in (self.sharding, replicated):
      g = jax.jit(f, in_shardings=self.sharding, out_shardings=out)
      y = g(x)
      self.assertAllClose(np.asarray(y), np.sin(chosen(X)), rtol=1e-5)
      self.assertTrue(y.sharding.is_equivalent_to(out, 2), y.sharding)
      self.assertNotIn("2.25", g.lower(x).as_text())
    direct = lambda x: jnp.sin(lax.with_sharding_constraint(
        tu.marked(1.25)(x), replicated))
    self.assertSameModule(f, direct, x)


class EightDevicesTest(tu.JcpTestCase):

  def test_in_a_process_with_eight(self):
    """Runs the tests above, which the flags of this process may not allow."""
    result = tu.run_python(
        """
        import sys, unittest
        import devices_test
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(
            devices_test.DevicesTest)
        result = unittest.TextTestRunner().run(suite)
        assert result.testsRun and not result.skipped, result
        sys.exit(not result.wasSuccessful())
        """, PYTHONPATH=tu.python_path(), JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={DEVICES}")
    self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
