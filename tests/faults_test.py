"""Tests that JAX works after faults, and with programs of unusual size."""
from concurrent import futures
import contextlib
import functools
import gc
import pathlib
import sys
from unittest import mock
import weakref

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np
from packaging import version

import jax_cond_patch
from jax_cond_patch import activation
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(4, dtype=np.float32)


def choose(x):
  return lax.platform_dependent(
      x, cpu=tu.marked(1.25), default=tu.marked(2.25))


@contextlib.contextmanager
def recursion_limit(limit: int):
  before = sys.getrecursionlimit()
  sys.setrecursionlimit(limit)
  try:
    yield
  finally:
    sys.setrecursionlimit(before)


class JaxWorksTestCase(tu.JcpTestCase):

  def assertWorks(self):
    """JAX computes what it should, and `status` is true."""
    table = activation.table()  # Also of what JAX imports late.
    status = jax_cond_patch.status()
    self.assertEqual(status.active, jax_cond_patch.is_active())
    self.assertLen(status.replaced, status.active * len(table))
    f = lambda x: choose(x)
    self.assertAllClose(jax.jit(f)(X), np.sin(X) * np.float32(1.25))
    self.assertAllClose(jax.grad(lambda x: f(x).sum())(X),
                        np.cos(X) * np.float32(1.25))
    self.assertIn("2.25", tu.lower(f, X, platforms=("cpu", "tpu")))
    self.assertEqual("case" in tu.lower(f, X, platforms=("cpu",)),
                     not status.active)


class FaultsTest(JaxWorksTestCase):

  @parameterized.parameters(
      ("activate", 0), *(("deactivate", i) for i in range(4)))
  def test_interrupted_switch(self, name, position):
    """Then JAX is as it was without the package, whatever was going on."""
    places = [r.place for r in activation.table()]
    jax_cond_patch.deactivate()
    original = [place.get() for place in places]
    if name == "deactivate":
      jax_cond_patch.activate()
    # Caches are cleared after each step, and that takes the most time.
    clear_caches = mock.Mock(
        side_effect=[None] * position + [KeyboardInterrupt])
    with mock.patch.object(activation, "_clear_caches", clear_caches):
      with self.assertRaises(KeyboardInterrupt):
        getattr(jax_cond_patch, name)()
    self.assertEqual(original, [place.get() for place in places])
    jax.clear_caches()
    self.assertWorks()
    jax_cond_patch.activate()
    self.assertWorks()

  @parameterized.parameters(("cpu",), ("tpu",), ("cpu", "cuda", "tpu"))
  @jtu.run_on_devices("cpu")
  def test_interrupted_lowering(self, *platforms):
    primitive = core.Primitive("interrupts")
    primitive.def_abstract_eval(lambda x: x)
    interrupts = [KeyboardInterrupt, MemoryError]
    def rule(ctx, x):
      if interrupts:
        raise interrupts.pop()
      return [x]
    mlir.register_lowering(primitive, rule)
    helper = jax.jit(lambda x: choose(primitive.bind(x)))
    @jax.jit
    def f(x):
      return lax.platform_dependent(
          helper(x), rocm=lambda x: x, default=lambda x: helper(x) + 1)
    for _ in range(2):
      with self.assertRaises((KeyboardInterrupt, MemoryError)):
        tu.lower(f, X, platforms=platforms)
    self.assertWorks()
    tu.lower(f, X, platforms=platforms)
    self.assertAllClose(
        f(X), np.sin(np.sin(X) * np.float32(1.25)) * np.float32(1.25) + 1)

  @parameterized.parameters(("cpu",), ("tpu",), ("cuda", "cpu", "tpu"))
  def test_deep_nesting(self, *platforms):
    """Branches in branches, 50 deep, with a helper in each."""
    # JAX needs 20 calls for each.
    self.enterContext(recursion_limit(5000))
    helper = jax.jit(choose)
    def nested(depth, x):
      if not depth:
        return helper(x)
      return lax.platform_dependent(
          x, rocm=lambda x: helper(x),
          default=lambda x: nested(depth - 1, x) + 1)
    def direct(factor, x):
      x = jax.jit(tu.marked(factor))(x)
      for _ in range(50):
        x = x + 1
      return x
    f = jax.jit(lambda x: nested(50, x))
    factors = {p: 1.25 if p == "cpu" else 2.25 for p in platforms}
    if len(platforms) > 1:
      self.assertRunsAs(
          f, {p: functools.partial(direct, factors[p]) for p in platforms}, X)
    grad = lambda f: jax.grad(lambda x: f(x).sum())
    exported = tu.export(jax.jit(grad(f)), platforms=platforms)(X)
    for p in platforms:
      np.testing.assert_allclose(
          tu.run_as(exported, p, X), np.cos(X) * factors[p], rtol=1e-5)

  def test_nesting_that_is_too_deep(self):
    """It is Python's error, at once, and no error of a branch."""
    def nested(depth, x):
      return lax.platform_dependent(
          x, cpu=lambda x: nested(depth - 1, x) if depth else x * 2,
          default=lambda x: x)
    f = jax.jit(lambda x: nested(50, x))
    with recursion_limit(5000):
      jax.make_jaxpr(f)(X)
    # Up to JAX 0.4.35 the error can leave a thread's stack of traces in
    # disorder, without the package too, so that has a thread of its own:
    # https://github.com/jax-ml/jax/commit/c36e1f7c1a.
    with futures.ThreadPoolExecutor(1) as executor, recursion_limit(600):
      with self.assertRaises(RecursionError):
        executor.submit(
            jax.make_jaxpr(jax.grad(lambda x: f(x).sum())), X).result()
    self.assertWorks()

  def test_many_sites(self):
    def f(x):
      for i in range(500):
        x = lax.platform_dependent(
            x, cpu=lambda x, i=i: x + i, default=lambda x, i=i: x - i)
      return x
    exported = self.assertRunsAs(f, dict(
        cpu=lambda x: x + sum(range(500)), tpu=lambda x: x - sum(range(500))),
                                 X)
    self.assertEqual(
        tu.count_ops(exported.mlir_module(), "stablehlo.case"), 500)

  def test_many_platforms(self):
    """JAX lets a branch have any name."""
    names = [f"platform_{i}" for i in range(64)]
    f = lambda x: lax.platform_dependent(
        x, cpu=tu.marked(1.25), default=tu.marked(2.25),
        **{name: tu.marked(i + 3.5) for i, name in enumerate(names)})
    for transformed in (f, jax.grad(lambda x: f(x).sum()), jax.vmap(f)):
      text = tu.lower(transformed, X, platforms=("cpu",))
      self.assertIn("1.25", text)
      self.assertEqual(tu.count_ops(text, "stablehlo.case"), 0)
      self.assertNotIn(".50", text)
    self.assertRunsAs(f, dict(
        cpu=tu.marked(1.25), cuda=tu.marked(2.25), tpu=tu.marked(2.25)), X)

  @jtu.run_on_devices("cpu")
  def test_constants_of_unreachable_branches(self):
    """They are in no module, and nothing that was made of it holds them."""
    def make(platforms):
      big = np.full((1 << 20,), 3.25, np.float32)
      f = jax.jit(lambda x: lax.platform_dependent(
          x, rocm=lambda x: x + jnp.asarray(big)[:4], default=jnp.sin))
      f(X)
      jax.grad(lambda x: f(x).sum())(X)
      # An `Exported` itself holds the function, for its derivative.
      module = tu.export(f, platforms=platforms)(X).mlir_module()
      self.assertLess(len(module), 1 << 16)
      return weakref.ref(big), f.lower(X).compile()
    for platforms in (("cpu",), ("cpu", "tpu")):
      ref, compiled = make(platforms)
      gc.collect()
      if tu.has("freed_constants"):
        self.assertIsNone(ref())
      self.assertAllClose(compiled(X), np.sin(X))

  @jtu.run_on_devices("cpu")
  def test_garbage_is_collected_while_jax_traces(self):
    """Free-threaded Python's collector has to leave what runs in peace."""
    @jax.custom_jvp
    def collect(x):
      gc.collect()
      return jnp.sin(x)

    @collect.defjvp
    def collect_jvp(primals, tangents):
      gc.collect()
      return collect(*primals), jnp.cos(*primals) * tangents[0]

    f = lambda x: lax.platform_dependent(
        x, cpu=collect, default=lambda x: collect(x) + 1)
    self.assertAllClose(jax.jit(f)(X), np.sin(X))
    self.assertAllClose(
        jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(X), np.cos(X))

  @parameterized.named_parameters(
      ("jit", lambda f: f),
      ("scan", lambda f: lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=2)[0]),
      ("grad", lambda f: jax.grad(lambda x: f(x).sum())),
      ("remat", lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())),
      ("conditional", lambda f: lambda x: lax.cond(
          lax.platform_dependent(cpu=lambda: True, default=lambda: False),
          f, lambda x: x, x)),
      ("conditional_in_jit", lambda f: lambda x: jax.jit(
          lambda i: lax.cond(i, f, lambda x: x, x))(
              lax.platform_dependent(cpu=lambda: True, default=lambda: False))),
  )
  @jtu.run_on_devices("cpu")
  def test_nothing_waits_for_the_garbage_collector(self, transform):
    """As in JAX, the arrays of a program are freed with it at once."""
    def run():
      scale = jax.device_put(X)
      f = jax.jit(transform(lambda x: lax.platform_dependent(
          x, cpu=lambda x: jnp.sin(x) * scale, cuda=lambda x: x - scale,
          default=lambda x: jnp.cos(x) * scale)))
      f(X).block_until_ready()
      f.lower(X)
      tu.export(f, platforms=("cpu", "cuda", "tpu"))(X)

    run()  # What is imported late makes garbage.
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
      run()
      gc.collect()
      ours = [x for x in gc.garbage if "jax_cond_patch" in str(
          getattr(x if callable(x) else type(x), "__module__", None))]
    finally:
      gc.set_debug(0)
      gc.garbage.clear()
    self.assertEmpty(ours)

  @tu.requires("freed_traces")
  @jtu.run_on_devices("cpu")
  def test_memory_is_flat(self):
    """After activations, traces and deactivations nothing is left."""
    def switch(times):
      for i in range(times):
        jax_cond_patch.deactivate()
        jax_cond_patch.activate()
        if i % 10 == 0:
          jax.make_jaxpr(jax.grad(lambda x: lax.platform_dependent(
              x, cpu=lax.sin, default=lax.cos)))(1.)
      jax.clear_caches()
      gc.collect()
      return len(gc.get_objects())
    before = switch(20)
    self.assertLess(switch(1000) - before, 500)


@tu.requires("modules_of_older_jax")
class OlderModulesTest(JaxWorksTestCase):
  """Modules that an older JAX made, with or without the package.

  tests/export_modules.py made them: three layers, of tanh for a CPU, of sin for
  a TPU and without an activation for the rest.
  """

  LAYERS = dict(cpu=jnp.tanh, tpu=jnp.sin, cuda=lambda x: x)

  @jtu.run_on_devices("cpu")
  def test_loads(self):
    paths = [
        path for path in (pathlib.Path(__file__).parent / "modules").iterdir()
        if version.parse(path.name.split("-")[0]) <=
        version.parse(jax.__version__)]
    self.assertNotEmpty(paths)
    for path in paths:
      with self.subTest(path.stem):
        serialized = bytearray(path.read_bytes())
        with jax_cond_patch.deactivated():
          try:
            tu.deserialize(serialized)
          except ValueError as error:
            refused = str(error)
          else:
            refused = ""
        if refused:
          # JAX itself reads those of half a year, and no older ones.
          self.assertIn("6-month backward-compatibility", refused)
          with self.assertRaises(ValueError) as caught:
            tu.deserialize(serialized)
          self.assertEqual(str(caught.exception), refused)
        else:
          self.check(tu.deserialize(serialized))
        self.assertWorks()

  def check(self, exported):
    x, w = X / 4, np.eye(4, dtype=np.float32) / 2 + np.float32(.1)
    def direct(platform):
      def layers(x, w):
        for _ in range(3):
          x = self.LAYERS[platform](x @ w)
        return x
      return layers
    grad = lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum()))
    self.assertAllClose(grad(exported.call)(x, w), grad(direct("cpu"))(x, w),
                        rtol=1e-5)
    # In a branch, in a module that is exported and written anew.
    in_branch = lambda x, w: lax.platform_dependent(
        x, w, rocm=lambda x, w: x - w[0], default=exported.call)
    again = tu.reloaded(tu.export(
        jax.jit(in_branch), platforms=(*self.LAYERS, "rocm"))(x, w))
    for platform in self.LAYERS:
      for module in (exported, again):
        self.assertAllClose(tu.run_as(module, platform, x, w),
                            direct(platform)(x, w), rtol=1e-5)
    self.assertAllClose(tu.run_as(again, "rocm", x, w), x - w[0])


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
