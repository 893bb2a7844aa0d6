"""Tests of the promise to lower for some platforms only."""
from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import core
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4


def never(x):
  raise AssertionError("This is not to be traced.")


def cpu_only(x):
  return lax.platform_dependent(
      x, cpu=tu.marked(1.25), cuda=never, tpu=never, default=never)


def choose(x):
  return lax.platform_dependent(x, cpu=tu.marked(1.25), tpu=tu.marked(4.25),
                                default=tu.marked(9.25))


WRAPS = dict(
    plain=lambda f: f,
    jit=jax.jit,
    vmap=jax.vmap,
    grad=lambda f: jax.grad(lambda x: f(x).sum()),
    grad_of_jit=lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
    hessian=lambda f: jax.hessian(lambda x: f(x).sum()),
    vjp_of_vmap=lambda f: lambda x: jax.vjp(jax.vmap(f), x)[1](x),
    linearize=lambda f: lambda x: jax.linearize(f, x)[1](x),
    scan=lambda f: lambda x: lax.scan(
        lambda c, _: (f(c), f(c)), x, None, length=3),
    grad_of_scan=lambda f: jax.grad(lambda x: lax.scan(
        lambda c, _: (f(c), None), x, None, length=3)[0].sum()),
    cond=lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    vmap_of_cond=lambda f: jax.vmap(
        lambda x: lax.cond(x > 0, f, lambda x: x, x)),
    while_=lambda f: lambda x: lax.while_loop(
        lambda x: x[0] < 1, lambda x: f(x) + 1, x),
    while_condition=lambda f: lambda x: lax.while_loop(
        lambda x: f(x)[0] < 1, lambda x: x + 1, x),
    remat=lambda f: lambda x: jax.checkpoint(f)(x) * 2,
    grad_of_remat=lambda f: jax.grad(
        lambda x: (jax.checkpoint(f)(x) * jax.checkpoint(jnp.cos)(x)).sum()),
    grad_of_remat_of_scan=lambda f: jax.grad(jax.checkpoint(lambda x: lax.scan(
        lambda c, _: (jnp.sin(f(c)), None), x, None, length=3)[0].sum())),
)


class PinningTest(tu.JcpTestCase):

  def setUp(self):
    super().setUp()
    self.assertIsNone(jax_cond_patch.status().pin)
    self.addCleanup(jax_cond_patch.pin, None)

  def assertBreaksPin(self, pin, platform):
    return self.assertRaisesRegex(
        NotImplementedError,
        f"(?s)pin {', '.join(map(repr, pin))}.*lowered for '{platform}'.*"
        "pinning_test.py")

  @parameterized.parameters(*WRAPS)
  def test_module_is_that_of_the_branch(self, wrap):
    wrap = WRAPS[wrap]
    jax_cond_patch.pin(("cpu",))
    def direct(x):
      return tu.marked(1.25)(x)
    direct.__name__ = "cpu_only"
    self.assertSameModule(wrap(cpu_only), wrap(direct), X)
    self.assertAllClose(wrap(cpu_only)(X), wrap(direct)(X))

  @parameterized.parameters(*WRAPS)
  def test_other_platform(self, wrap):
    jax_cond_patch.pin(("cpu",))
    traced = core.jaxpr_as_fun(jax.make_jaxpr(WRAPS[wrap](cpu_only))(X))
    with self.assertBreaksPin(("cpu",), "tpu"):
      tu.lower(traced, X, platforms=("tpu",))
    with self.assertBreaksPin(("cpu",), "tpu"):
      tu.lower(WRAPS[wrap](cpu_only), X, platforms=("cpu", "tpu"))
    # Nor once the pin is gone.
    jax_cond_patch.pin(None)
    with self.assertBreaksPin(("cpu",), "tpu"):
      tu.lower(traced, X, platforms=("tpu",))
    self.assertIn("1.25", tu.lower(traced, X, platforms=("cpu",)))

  def test_one_platform_left(self):
    jax_cond_patch.pin(("cpu",))
    jaxpr = jax.make_jaxpr(cpu_only)(X)
    self.assertEqual(0, tu.count_eqns(jaxpr, "cond"))
    self.assertEqual(0, tu.count_eqns(jaxpr, "platform_index"))
    self.assertAllClose(cpu_only(X), tu.marked(1.25)(X))
    jax_cond_patch.pin(("rocm", "cuda"))
    f = lambda x: lax.platform_dependent(x, cpu=never, tpu=never,
                                         default=tu.marked(9.25))
    self.assertEqual(0, tu.count_eqns(jax.make_jaxpr(f)(X), "cond"))
    for platform in ("cuda", "rocm"):
      self.assertSameModule(f, tu.marked(9.25), X, platform=platform)

  def test_several_platforms_left(self):
    jax_cond_patch.pin(("cpu", "tpu"))
    f = lambda x: lax.platform_dependent(
        x, cpu=tu.marked(1.25), cuda=never, tpu=tu.marked(4.25), default=never)
    self.assertSameModule(f, tu.marked(1.25), X, platform="cpu")
    self.assertSameModule(f, tu.marked(4.25), X, platform="tpu")
    self.assertRunsAs(f, dict(cpu=tu.marked(1.25), tpu=tu.marked(4.25)), X)
    self.assertAllClose(f(X), tu.marked(1.25)(X))
    with self.assertBreaksPin(("cpu", "tpu"), "cuda"):
      tu.lower(f, X, platforms=("cuda",))

  def test_choice_that_is_not_made_is_lowered_for_any_platform(self):
    jax_cond_patch.pin(("cpu",))
    self.assertIn("sine", tu.lower(jnp.sin, X, platforms=("tpu",)))

  def test_flag(self):
    """A branch without equations breaks the promise as well."""
    f = lambda x: lax.cond(
        lax.platform_dependent(cpu=lambda: False, tpu=lambda: True),
        tu.only_on("tpu"), lambda x: x * 3, x)
    jax_cond_patch.pin(("cpu",))
    self.assertSameModule(f, lambda x: x * 3, X)
    with self.assertBreaksPin(("cpu",), "tpu"):
      tu.lower(f, X, platforms=("tpu",))

  def test_jaxpr_of_a_user(self):
    jax_cond_patch.pin(("cpu",))
    f = core.jaxpr_as_fun(jax.make_jaxpr(jax.jit(cpu_only))(X))
    jax_cond_patch.pin(None)
    self.assertAllClose(jax.jit(f)(X)[0], tu.marked(1.25)(X))
    with self.assertBreaksPin(("cpu",), "tpu"):
      tu.lower(f, X, platforms=("tpu",))
    # JAX alone does not know what it would lower.
    with jax_cond_patch.deactivated():
      with self.assertRaisesRegex(ValueError, "PinnedEffect.*cpu"):
        tu.lower(f, X, platforms=("tpu",))

  @tu.requires("serialization")
  def test_export(self):
    jax_cond_patch.pin(("cpu",))
    reloaded = tu.reloaded(
        tu.export(jax.jit(cpu_only))(X), vjp_order=1)
    for pin in (("cpu",), None):
      jax_cond_patch.pin(pin)
      self.assertEqual(reloaded.platforms, ("cpu",))
      self.assertAllClose(reloaded.call(X), tu.marked(1.25)(X))
      self.assertAllClose(jax.grad(lambda x: reloaded.call(x).sum())(X),
                          jax.grad(lambda x: tu.marked(1.25)(x).sum())(X))
      for platforms in (("tpu",), ("cpu", "tpu")):
        for f in (lambda x: reloaded.call(x),
                  jax.grad(lambda x: reloaded.call(x).sum())):
          with self.assertRaisesRegex(
              NotImplementedError,
              "cpu_only, was exported under the pin 'cpu',.*for 'tpu'"):
            tu.lower(f, X, platforms=platforms)
    jax_cond_patch.pin(("cpu",))
    for platforms in (("tpu",), ("cpu", "tpu")):
      with self.assertBreaksPin(("cpu",), "tpu"):
        tu.export(jax.jit(cpu_only), platforms=platforms)(X)

  @parameterized.parameters(True, False)
  def test_shard_map(self, check):
    """Its check knows the mark, from JAX 0.4.36 to 0.5.3."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    f = tu.shard_map(cpu_only, mesh=mesh, in_specs=spec, out_specs=spec,
                     check=check)
    jax_cond_patch.pin(("cpu",))
    direct = tu.marked(1.25)
    self.assertAllClose(jax.jit(f)(X), direct(X))
    self.assertAllClose(jax.jit(jax.vmap(f))(X[None]), direct(X[None]))
    self.assertAllClose(jax.jit(jax.grad(lambda x: f(x).sum()))(X),
                        jax.grad(lambda x: direct(x).sum())(X))

  @tu.requires("compute_on")
  def test_compute_on_host(self):
    f = lambda x: choose(tu.on_host(choose)(x))
    jax_cond_patch.pin(("tpu",))
    with self.assertBreaksPin(("tpu",), "cpu"):
      tu.lower(f, X, platforms=("tpu",))
    # Without a choice there, the host is no other platform.
    text = tu.lower(lambda x: choose(tu.on_host(jnp.cos)(x)), X,
                    platforms=("tpu",))
    self.assertIn("4.25", text)
    jax_cond_patch.pin(("tpu", "cpu"))
    text = tu.lower(f, X, platforms=("tpu",))
    self.assertIn("1.25", text)
    self.assertIn("4.25", text)

  def test_kernel(self):
    """What a kernel chooses is not pinned."""
    def kernel(x_ref, o_ref):
      o_ref[...] = lax.platform_dependent(
          x_ref[...], cpu=lambda x: x + 1, default=lambda x: x + 2)
    f = pl.pallas_call(kernel, interpret=True, out_shape=jax.ShapeDtypeStruct(
        (8, 128), np.float32))
    x = np.ones((8, 128), np.float32)
    jax_cond_patch.pin(("cpu",))
    self.assertAllClose(jax.jit(f)(x), x + 1)
    self.assertAllClose(jnp.diagonal(x), x[0, :8])

  def test_missing_branch(self):
    jax_cond_patch.pin(("cpu",))
    tpu_only = lambda x: lax.platform_dependent(x, tpu=tu.marked(1.5))
    for f in (tpu_only, jax.grad(lambda x: tpu_only(x).sum())):
      with self.assertRaisesRegex(NotImplementedError, "no branch for 'cpu'"):
        jax.jit(f)(X)
    # Nor can it break a program in which it is not reached.
    jax_cond_patch.pin(("cpu", "cuda"))
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: lax.platform_dependent(
            x, cpu=tu.marked(1.25), cuda=tpu_only), cuda=tu.marked(1.75))
    self.assertSameModule(f, tu.marked(1.25), X)
    jax_cond_patch.pin(("cpu", "tpu"))
    f = lambda x: lax.platform_dependent(x, cpu=tu.marked(1.25), cuda=never)
    self.assertSameModule(f, tu.marked(1.25), X)
    with self.assertRaisesRegex(NotImplementedError, "no branch for 'tpu'"):
      tu.lower(f, X, platforms=("tpu",))

  def test_change_forgets_traces(self):
    f = jax.jit(choose)
    text = lambda platform: tu.lower_jitted(
        f, X, platforms=(platform,)).as_text()
    self.assertIn("4.25", text("tpu"))
    jax_cond_patch.pin(("cpu",))
    with self.assertBreaksPin(("cpu",), "tpu"):
      text("tpu")
    jax_cond_patch.pin(("tpu",))
    self.assertIn("4.25", text("tpu"))
    jax_cond_patch.pin(None)
    self.assertIn("9.25", text("rocm"))

  def test_fast_dispatch(self):
    """The mark is not left in what is run."""
    jax_cond_patch.pin(("cpu",))
    f = jax.jit(cpu_only)
    f(X)
    compiled = f.lower(X).compile()._executable.unsafe_call
    self.assertFalse(compiled.has_unordered_effects)
    self.assertEmpty(compiled.ordered_effects)

  def test_nested_in_loop(self):
    """Nor where only one of several branches has it."""
    jax_cond_patch.pin(("cpu", "cuda", "tpu"))
    inner = lambda x: lax.platform_dependent(
        x, cpu=tu.marked(1.25), default=tu.marked(4.25))
    for outer in (
        lambda x: lax.platform_dependent(x, tpu=inner, default=jnp.sin),
        lambda x: lax.cond(x[0] > 0, inner, jnp.sin, x)):
      exported = tu.export(jax.jit(lambda x: lax.while_loop(
          lambda x: x[0] < 1, lambda x: outer(x) + 1, x)),
          platforms=("cpu", "cuda", "tpu"))(X)
      self.assertEmpty(exported.unordered_effects)

  def test_status_and_switching(self):
    jax_cond_patch.activate(pin=["cpu", "cpu"])
    self.assertEqual(jax_cond_patch.status().pin, ("cpu",))
    with jax_cond_patch.deactivated():
      with self.assertRaises(AssertionError):
        jax.make_jaxpr(cpu_only)(X)
    jax_cond_patch.activate()
    self.assertEqual(jax_cond_patch.status().pin, ("cpu",))
    jax.make_jaxpr(cpu_only)(X)

  def test_wrong_pins(self):
    for pin in ((), "", ("",), (1,)):
      with self.assertRaisesRegex(ValueError, "names of platforms"):
        jax_cond_patch.pin(pin)
    with self.assertRaisesRegex(ValueError, "'cuda' or 'rocm'"):
      jax_cond_patch.activate(pin=("gpu",))
    self.assertIsNone(jax_cond_patch.status().pin)

  def test_environment(self):
    program = "import jax_cond_patch; print(jax_cond_patch.status().pin)"
    for value, expected in (("cpu", "('cpu',)"),
                            ("tpu, cpu", "('tpu', 'cpu')")):
      out = tu.run_python(program, JAX_COND_PATCH_PIN=value)
      self.assertEqual(out.stdout.strip(), expected, out.stderr)
    for value in ("", "cpu,", "gpu"):
      out = tu.run_python(program, JAX_COND_PATCH_PIN=value)
      self.assertNotEqual(0, out.returncode)
      self.assertIn("JAX_COND_PATCH_PIN", out.stderr)


if __name__ == "__main__":
  absltest.main()
