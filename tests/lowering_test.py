"""Tests that a module holds only what its lowering platforms reach."""
import contextlib
import gc
import io
import itertools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src.interpreters import partial_eval as pe
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

try:
  from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:
  set_xla_metadata = None

from jax_cond_patch import resolution
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4
BLOCK = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
BRANCHES = dict(cpu=tu.marked(1.25), cuda=tu.marked(2.25),
                rocm=tu.marked(3.25), tpu=tu.marked(4.25))


def choose(x):
  return lax.platform_dependent(x, **BRANCHES)


def nested(x):
  """Platform conditionals in branches, some without a default."""
  def inner(x):
    return lax.platform_dependent(
        x, cpu=lambda x: lax.platform_dependent(
            x, cpu=BRANCHES["cpu"], default=lambda x: x * 9.5),
        cuda=BRANCHES["cuda"])
  return lax.platform_dependent(
      x, tpu=BRANCHES["tpu"], rocm=BRANCHES["rocm"], default=inner)


def add_one_kernel(x_ref, o_ref):
  o_ref[...] = x_ref[...] + 1


def kernel(x):
  return pl.pallas_call(
      add_one_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


class OnePlatformTest(tu.JcpTestCase):

  @parameterized.product(platform=tuple(BRANCHES), f=(choose, nested))
  def test_module_is_that_of_the_owner(self, platform, f):
    owner = BRANCHES[platform]
    wraps = dict(
        plain=lambda f: f, jit=jax.jit, vmap=jax.vmap,
        grad=lambda f: jax.grad(lambda x: f(x).sum()),
        scan=lambda f: lambda x: lax.scan(
            lambda c, _: (f(c), f(c)), x, None, length=3),
        cond=lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
        while_=lambda f: lambda x: lax.while_loop(
            lambda x: x[0] < 1, lambda x: f(x) + 1, x),
        remat=lambda f: lambda x: jax.checkpoint(f)(x) * 2)
    for name, wrap in wraps.items():
      with self.subTest(name):
        if name == "jit":
          # The names of jitted functions are in the text.
          def direct(x):
            return owner(x)
          direct.__name__ = f.__name__
          self.assertSameModule(wrap(f), wrap(direct), X, platform=platform)
        else:
          self.assertSameModule(wrap(f), wrap(owner), X, platform=platform)

  def test_every_platform_refuses_the_others_code(self):
    def f(x):
      return lax.platform_dependent(x, **{p: tu.only_on(p) for p in BRANCHES})
    for g in (f, jax.vmap(f), jax.grad(lambda x: f(x).sum()), jax.jit(f)):
      for platform in BRANCHES:
        self.assertNotIn("case", tu.lower(g, X, platforms=(platform,)))
    self.assertAllClose(jax.jit(f)(X), X + 1)

  def test_eager_scan(self):
    f = lambda x: lax.platform_dependent(x, tpu=kernel, default=lambda x: x + 1)
    out, _ = lax.scan(lambda c, _: (f(c), None), BLOCK, None, length=3)
    self.assertAllClose(out, BLOCK + 3)

  def test_reachable_branch_that_cannot_be_lowered(self):
    """It raises its own error, the one of the branch called directly."""
    f = lambda x: lax.platform_dependent(x, tpu=lambda x: x, default=kernel)
    with self.assertRaises(Exception) as direct:
      jax.jit(kernel)(BLOCK)
    with self.assertRaises(type(direct.exception)) as chosen:
      jax.jit(f)(BLOCK)
    self.assertEqual(str(chosen.exception), str(direct.exception))

  def test_inputs_and_constants_of_other_branches(self):
    big = np.arange(1000, dtype=np.float32) + .5
    f = lambda x, y: lax.platform_dependent(
        x, y, cpu=lambda x, y: x,
        default=lambda x, y: x + y + big[:4] + big[-1])
    self.assertSameModule(f, lambda x, y: x, X, X)
    text = tu.lower(f, X, X, platforms=("cpu",))
    self.assertLess(len(text), 1000)

  def test_constants_of_the_owner(self):
    big = np.arange(1000, dtype=np.float32) + .5
    owner = lambda x: x + big
    f = lambda x: lax.platform_dependent(x, cpu=owner, default=lambda x: x)
    self.assertSameModule(f, owner, big)
    self.assertAllClose(jax.jit(f)(big), 2 * big)

  def test_zeros_for_residuals_of_other_branches(self):
    def tpu(x):
      return jnp.tanh(jnp.tanh(jnp.outer(x, x)) @ x)
    f = lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=tpu)
    for wrap in (lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
                 lambda f: jax.grad(lambda x: lax.scan(
                     lambda c, _: (f(c), None), x, None, length=3)[0].sum())):
      text = tu.lower(wrap(f), X, platforms=("cpu",))
      self.assertNotIn("4x4", text)

  def test_jitted_helpers_are_shared(self):
    @jax.jit
    def helper(x):
      return jnp.sin(x) * 2
    def model(x):
      for _ in range(20):
        x = lax.platform_dependent(x, cpu=helper, default=lambda x: x)
      return x
    text = tu.lower(model, X, platforms=("cpu",))
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 1)

  def test_branch_inlined_twice(self):
    branches = {p: tu.marked(2) for p in ("cpu", "tpu")}
    @jax.jit
    def f(x):
      return lax.platform_dependent(x, **branches)
    g = lambda x: f(f(x)) + f(x)
    once = lambda x: np.sin(x) * 2
    self.assertAllClose(jax.jit(g)(X), once(once(X)) + once(X), rtol=1e-5)

  def test_branches_with_the_same_variables(self):
    """JAX drops dead code of a jaxpr, and keeps its other variables."""
    def alive(branch):
      return internals.map_jaxpr(
          lambda jaxpr: pe.dce_jaxpr(jaxpr, [True, False], True)[0], branch)
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: (jnp.sin(x) * 2, jnp.cos(x)),
        default=lambda x: (x * 3, x * 4))
    (cond,) = tu.find_eqns(jax.make_jaxpr(f)(X), "cond")
    params = {**cond.params,
              "branches": tuple(map(alive, cond.params["branches"]))}
    def g(x):
      x, _ = cond.primitive.bind(np.int32(0), x, **cond.params)
      return cond.primitive.bind(np.int32(0), x, **params)
    resolved = resolution.resolve(
        jax.make_jaxpr(g)(X), ("cpu",), resolution.Scope.PROGRAM)
    self.assertEqual(tu.count_eqns(resolved, "sin"), 2)
    core.check_jaxpr(internals.open_jaxpr(resolved))
    self.assertAllClose(core.jaxpr_as_fun(resolved)(X),
                        [np.sin(np.sin(X) * 2) * 2], rtol=1e-5)

  @parameterized.parameters(False, True)
  def test_operands_of_other_branches(self, keep_unused):
    """They are dead, which JAX ignores if it is to keep unused inputs."""
    f = lambda x, y: lax.platform_dependent(
        x, jnp.sin(y), cpu=lambda x, z: x * 2, default=lambda x, z: z)
    text = tu.lower_jitted(jax.jit(f, keep_unused=keep_unused), X, X,
                           platforms=("cpu",)).as_text()
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 0)
    self.assertEqual(tu.count_ops(text, "stablehlo.multiply"), 1)

  @parameterized.parameters(((),), ((0,),), ((1,),))
  def test_dead_code_of_the_branch_that_runs(self, donate_argnums):
    def used_in_part(x, y):
      return lax.fori_loop(0, 3, lambda _, c: (c[0] * 2, c[1] + y), (x, y))[0]
    def module(f):
      jitted = jax.jit(lambda x, y: f(x, y), donate_argnums=donate_argnums)
      return tu.lower_jitted(jitted, X, X, platforms=("tpu",)).as_text()
    for owner in (lambda x, y: x * 2, lambda x, y: (jnp.cos(y), x * 2)[1],
                  lambda x, y: x + jax.jit(lambda y: y * 2)(y)[0] * 0,
                  lambda x, y: (jax.jit(lambda: None)(), x * y)[1],
                  lambda x, y: (jax.jit(jnp.cos)(y), x * 2)[1],
                  lambda x, y: jax.jit(lambda x, y: (x, y))(x, y)[0] * 2,
                  used_in_part):
      branchy = module(lambda x, y: lax.platform_dependent(
          x, y, tpu=owner, default=lambda x, y: x))
      self.assertEqual(branchy, module(owner))

  def test_dead_call_without_inputs_and_outputs(self):
    """JAX does not look for dead code if it is to keep unused inputs."""
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: (jax.jit(lambda: None)(), x * 2)[1],
        default=lambda x: x)
    text = tu.lower_jitted(jax.jit(f, keep_unused=True), X,
                           platforms=("cpu",)).as_text()
    self.assertNotIn("call", text)

  def test_passthrough_outputs(self):
    f = lambda x, y: lax.platform_dependent(
        x, y, cpu=lambda x, y: (y, x, x + y), default=lambda x, y: (x, x, y))
    self.assertSameModule(f, lambda x, y: (y, x, x + y), X, 2 * X)

  @jtu.run_on_devices("cpu")
  def test_value_on_the_platform_that_runs(self):
    self.assertAllClose(jax.jit(choose)(X), np.sin(X) * np.float32(1.25))
    self.assertAllClose(choose(X), np.sin(X) * np.float32(1.25))

  @tu.requires("compute_on")
  def test_compute_on(self):
    # JAX 0.4.31 reuses what it has traced on the host, so that has branches of
    # its own: https://github.com/jax-ml/jax/commit/a144eb234b.
    def inner(x):
      return lax.platform_dependent(
          x, cpu=tu.marked(5.25), tpu=tu.marked(6.25))
    def f(x):
      return choose(tu.on_host(inner)(x))
    text = tu.lower(f, X, platforms=("tpu",))
    inner_directly = tu.marked(5.25)
    inner_directly.__name__ = inner.__name__
    direct = tu.lower(lambda x: tu.marked(4.25)(tu.on_host(inner_directly)(x)),
                      X, platforms=("tpu",))
    for shown in (r"stablehlo\.\w+", r"dense<\S*", r".*_xla_compute_type.*"):
      self.assertEqual(re.findall(shown, text), re.findall(shown, direct))
    self.assertAllClose(
        jax.jit(f)(X), np.sin(np.sin(X) * 5.25) * 1.25, rtol=1e-5)

  @tu.requires("compute_on")
  def test_compute_on_with_a_branch_that_returns_its_operand(self):
    """What computed the operand is not moved to the host."""
    inner = lambda x: lax.platform_dependent(
        x, cpu=lambda x: x, default=lambda x: x * 2)
    def f(x):
      return tu.on_host(inner)(jnp.sin(x)) + 1
    text = tu.lower(f, X, platforms=("tpu",))
    sine, = re.findall(r".*stablehlo.sine.*", text)
    self.assertNotIn("_xla_compute_type", sine)
    inner_directly = lambda x: x
    direct = tu.lower(lambda x: tu.on_host(inner_directly)(jnp.sin(x)) + 1, X,
                      platforms=("tpu",))
    self.assertEqual(re.findall(r"stablehlo\.\w+|dense<\S*", text),
                     re.findall(r"stablehlo\.\w+|dense<\S*", direct))

  @tu.requires("set_xla_metadata")
  def test_metadata_with_a_branch_that_returns_its_operand(self):
    def marked(f):
      def g(x):
        y = jnp.sin(x)
        with set_xla_metadata(mark="here"):
          return f(y) + 1
      return g
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: x, default=lambda x: x * 2)
    self.assertSameModule(marked(f), marked(lambda x: x), X)

  @parameterized.named_parameters(
      ("jit", lambda f: f),
      ("jit_in_jit", jax.jit),
      ("scan", lambda f: lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=2)[0]),
      ("grad", lambda f: jax.grad(lambda x: f(x).sum())),
      ("known_conditional", lambda f: lambda x: lax.cond(
          True, f, lambda x: x, x)),
  )
  @tu.requires("freed_constants")
  @jtu.run_on_devices("cpu")
  def test_arrays_are_freed_with_the_program(self, transform):
    """At once, as in JAX: https://github.com/jax-ml/jax/issues/12719."""
    def branch_only(scale):
      return lambda x: jnp.sin(x) * scale

    def conditional(scale):
      return lambda x: lax.platform_dependent(
          x, cpu=branch_only(scale), default=lambda x: x - scale)

    def kept_arrays(make):
      def run():
        f = make(jax.device_put(X))
        jax.jit(transform(f))(X).block_until_ready()

      run()
      gc.collect()
      before = len(jax.live_arrays())
      gc.disable()
      try:
        run()
        return len(jax.live_arrays()) - before
      finally:
        gc.enable()

    # JAX 0.7.0 keeps what a jitted function in a jitted one closes over.
    self.assertEqual(kept_arrays(conditional), kept_arrays(branch_only))


class EffectsTest(tu.JcpTestCase):

  def test_ordered_effect_in_a_dropped_branch(self):
    def logs(x):
      io_callback(lambda x: None, None, x, ordered=True)
      return x * 5
    def prints(x):
      jax.debug.print("never {}", x, ordered=True)
      return x * 5
    for noisy in (logs, prints):
      f = lambda x: lax.platform_dependent(
          x, tpu=noisy, default=lambda x: x + 1)
      loop = lambda f: lambda x: lax.fori_loop(0, 2, lambda _, c: f(c), x)
      scan = lambda f: lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=2)[0]
      # JAX gives all branches of a conditional the effects of each.
      conditional_in_loop = lambda f: lambda x: lax.while_loop(
          lambda x: x[0] < 1, lambda x: lax.cond(x[1] > 0, f, jnp.sin, x), x)
      for wrap in (lambda f: f, loop, scan, conditional_in_loop):
        # No token is left in the module either.
        self.assertSameModule(wrap(f), wrap(lambda x: x + 1), X)
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        self.assertAllClose(jax.jit(f)(X), X + 1)
        self.assertAllClose(jax.jit(loop(f))(X), X + 2)
        jax.effects_barrier()
      self.assertEqual(out.getvalue(), "")

  @jtu.run_on_devices("cpu")
  def test_ordered_effect_in_the_owner(self):
    seen = []
    def noisy(x):
      io_callback(lambda x: seen.append(float(x[0])), None, x, ordered=True)
      return x + 1
    f = lambda x: lax.platform_dependent(x, cpu=noisy, default=lambda x: x)
    jax.jit(lambda x: f(f(x)))(X)
    jax.effects_barrier()
    self.assertEqual(seen, [.25, 1.25])
    seen.clear()
    jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, c: f(c), x))(X)
    jax.effects_barrier()
    self.assertEqual(seen, [.25, 1.25, 2.25])

  def test_ordered_effect_in_a_dropped_branch_on_many_devices(self):
    # JAX refuses ordered effects on several devices.
    result = tu.run_python("""
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax_cond_patch
        import jax, numpy as np
        from jax import lax
        from jax.experimental import io_callback
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        def noisy(x):
          io_callback(lambda x: None, None, x, ordered=True)
          return x
        x = jax.device_put(np.arange(4.), NamedSharding(
            Mesh(np.array(jax.devices()), "i"), P("i")))
        f = jax.jit(lambda x: lax.platform_dependent(
            x, tpu=noisy, default=lambda x: x + 1))
        assert len(x.sharding.device_set) == 2
        np.testing.assert_array_equal(f(x), np.arange(4.) + 1)
        """)
    self.assertEqual(result.returncode, 0, result.stderr)


class SeveralPlatformsTest(tu.JcpTestCase):

  @parameterized.parameters(
      *itertools.permutations(("cpu", "cuda", "tpu")), ("cpu", "tpu"),
      ("rocm", "cpu"), ("cpu", "cuda", "rocm", "tpu"))
  def test_each_platform_takes_its_own(self, *platforms):
    for f in (choose, nested):
      exported = self.assertRunsAs(
          f, {p: BRANCHES[p] for p in platforms}, X, platforms=platforms,
          rtol=1e-5)
      text = exported.mlir_module()
      for platform, value in dict(
          cpu="1.25", cuda="2.25", rocm="3.25", tpu="4.25").items():
        self.assertEqual(value in text, platform in platforms)
      self.assertNotIn("9.5", text)

  def test_one_case(self):
    """One `case`, with an arm for each branch that is reached."""
    for platforms in (("cpu", "tpu"), ("tpu", "cuda", "cpu")):
      text = tu.lower(choose, X, platforms=platforms)
      self.assertEqual(tu.count_ops(text, "stablehlo.case"), 1, text)
      arms = re.search(r"stablehlo.case.*?\n    }\)", text, re.S)[0]
      self.assertEqual(arms.count("stablehlo.return"), len(platforms))
    f = lambda x: lax.platform_dependent(
        x, tpu=tu.marked(2.5), default=tu.marked(3.5))
    text = tu.lower(f, X, platforms=("cpu", "cuda", "tpu"))
    self.assertEqual(tu.count_ops(text, "stablehlo.case"), 1, text)
    self.assertEqual(text.count("stablehlo.sine"), 2)

  def test_one_owner_is_inlined(self):
    f = lambda x: lax.platform_dependent(
        x, tpu=tu.marked(2.5), default=tu.marked(3.5))
    text = tu.lower(f, X, platforms=("cpu", "cuda"))
    self.assertNotIn("case", text)
    self.assertNotIn("2.5", text)
    direct = tu.lower(tu.marked(3.5), X, platforms=("cpu", "cuda"))
    self.assertEqual(tu.count_ops(text, "stablehlo.constant"),
                     tu.count_ops(direct, "stablehlo.constant"))

  def test_arms_are_lowered_for_what_they_own(self):
    for platforms in (("cpu", "tpu"), ("cpu", "cuda", "tpu"),
                      ("tpu", "rocm", "cuda", "cpu")):
      f = lambda x: lax.platform_dependent(
          x, **{p: tu.only_on(p) for p in platforms})
      for g, expected in ((f, X + 1), (jax.jit(f), X + 1), (jax.vmap(f), X + 1),
                          (jax.grad(lambda x: f(x).sum()), np.ones_like(X))):
        exported = tu.export(jax.jit(g), platforms=platforms)(X)
        self.assertAllClose(exported.call(X), expected)

  @tu.requires("tpu_kernels")
  def test_kernel_in_a_tpu_branch(self):
    f = lambda x: lax.platform_dependent(x, tpu=kernel, default=lambda x: x + 1)
    def model(x):
      x = lax.fori_loop(0, 3, lambda _, c: jax.jit(f)(c), x)
      return lax.cond(x[0, 0] > 0, f, lambda x: x - 1, x)
    for platforms in (("cpu", "tpu"), ("cpu", "cuda", "tpu")):
      exported = tu.export(jax.jit(model), platforms=platforms)(BLOCK)
      self.assertIn("tpu_custom_call", exported.mlir_module())
      self.assertAllClose(exported.call(BLOCK), BLOCK + 4)

  def test_eig_in_a_cpu_branch(self):
    matrix = np.array([[2., 1.], [.5, -1.]], np.float32)
    def closed_form(m):
      trace, det = m[0, 0] + m[1, 1], m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
      root = jnp.sqrt(trace * trace / 4 - det)
      return jnp.stack([trace / 2 - root, trace / 2 + root])
    def f(m):
      return lax.platform_dependent(
          m, cpu=lambda m: jnp.sort(jnp.linalg.eigvals(m).real),
          default=closed_form)
    expected = lambda m: np.sort(np.linalg.eigvals(m).real)
    for platforms in (("cpu", "tpu"), ("tpu", "cuda", "cpu")):
      self.assertRunsAs(f, {p: expected for p in platforms}, matrix,
                        platforms=platforms, rtol=1e-5)

  def test_index_counts_the_narrowed_platforms(self):
    """A conditional in a lowering rule that is for some of the platforms."""
    primitive = core.Primitive("narrowed_index")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(
        lambda x: x + 1, multiple_results=False), platform="cpu")
    mlir.register_lowering(primitive, mlir.lower_fun(
        lambda x: lax.platform_dependent(
            x, cuda=lambda x: x + 2, tpu=lambda x: x + 3,
            default=lambda x: x + 4), multiple_results=False))
    adds = dict(cpu=1, cuda=2, tpu=3, rocm=4)
    for platforms in (*itertools.permutations(("cpu", "cuda", "tpu")),
                      ("rocm", "tpu", "cpu", "cuda")):
      self.assertRunsAs(primitive.bind,
                        {p: (lambda x, p=p: x + adds[p]) for p in platforms}, X)

  def test_helper_shared_by_lowering_rules(self):
    """A jitted function lowered for one set of platforms serves no other."""
    @jax.jit
    def helper(x):
      return choose(x)
    primitive = core.Primitive("shared_helper")
    primitive.def_abstract_eval(lambda x: x)
    for platform in ("cpu", None):
      mlir.register_lowering(primitive, mlir.lower_fun(
          lambda x: helper(x) * 1, multiple_results=False), platform=platform)
    f = lambda x: primitive.bind(x) + helper(x) - helper(x)
    self.assertRunsAs(f, BRANCHES, X, rtol=1e-5)

  def test_helper_shared_by_arms(self):
    @jax.jit
    def helper(x):
      return choose(x)
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: helper(x) + 1, tpu=lambda x: helper(x) + 1,
        default=lambda x: helper(helper(x)) + 1)
    self.assertRunsAs(f, dict(
        cpu=lambda x: BRANCHES["cpu"](x) + 1,
        cuda=lambda x: BRANCHES["cuda"](BRANCHES["cuda"](x)) + 1,
        rocm=lambda x: BRANCHES["rocm"](BRANCHES["rocm"](x)) + 1,
        tpu=lambda x: BRANCHES["tpu"](x) + 1), X, rtol=1e-5)

  def test_helper_is_lowered_once_for_a_set_of_platforms(self):
    @jax.jit
    def helper(x):
      return jnp.sin(x) * 2
    def repeated(x):
      for _ in range(20):
        x = helper(x)
      return x
    f = lambda x: lax.platform_dependent(
        repeated(x), tpu=repeated, default=lambda x: repeated(x) + 1)
    text = tu.lower(f, X, platforms=("cpu", "cuda", "tpu"))
    # Once outside, and once in each arm.
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 3)

  def test_effects_in_some_arms(self):
    seen = []
    def noisy(x):
      jax.debug.callback(lambda x: seen.append(float(x[0])), x, ordered=True)
      return x + 1
    def f(x):
      return lax.platform_dependent(
          x, cpu=lambda x: x + 2, cuda=noisy, tpu=noisy)
    # Callbacks cannot be exported, but a module holds their tokens.
    text = tu.lower(lambda x: f(f(x)), X, platforms=("cpu",))
    self.assertNotIn("token", text)

  def test_ordinary_module_is_as_without(self):
    @jax.jit
    def helper(x):
      return jnp.cumsum(jnp.sin(x)) + jnp.linalg.norm(x)
    def f(x):
      x = lax.cond(x[0] > 0, helper, jnp.cos, x)
      return helper(lax.fori_loop(0, 3, lambda _, c: helper(c), x))
    for platforms in (("cpu",), ("tpu",)):
      self.assertSameModuleAsWithout(f, X, platforms=platforms)

  def test_ordinary_module_without_narrowing_is_as_without(self):
    @jax.jit
    def helper(x):
      return jnp.sin(x) + jnp.linalg.norm(x)
    def f(x):
      x = lax.cond(x[0] > 0, helper, jnp.cos, x)
      return helper(lax.fori_loop(0, 3, lambda _, c: helper(c), x))
    self.assertSameModuleAsWithout(f, X, platforms=("cpu", "cuda", "tpu"))

  def test_symbolic_shapes(self):
    b, = tu.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b, 4), np.float32)
    f = lambda x: jnp.sum(nested(x), axis=-1) / x.shape[0]
    platforms = ("tpu", "cuda", "cpu")
    exported = tu.export(jax.jit(f), platforms=platforms)(spec)
    for n in (1, 3):
      x = np.ones((n, 4), np.float32)
      for platform in platforms:
        np.testing.assert_allclose(
            tu.run_as(exported, platform, x),
            BRANCHES[platform](x).sum(-1) / n, rtol=1e-5)

  def test_exported_gradient(self):
    exported = tu.export(jax.jit(nested), platforms=("tpu", "cpu"))(X)
    vjp = exported.vjp()
    for platform, value in (("cpu", 1.25), ("tpu", 4.25)):
      np.testing.assert_allclose(
          tu.run_as(vjp, platform, X, np.ones_like(X))[0],
          np.cos(X) * value, rtol=1e-5)

  def test_call_of_an_exported_function_in_a_branch(self):
    inner = tu.export(jax.jit(choose), platforms=("cpu", "cuda"))(X)
    f = lambda x: lax.platform_dependent(
        x, tpu=BRANCHES["tpu"], default=inner.call)
    self.assertAllClose(jax.jit(f)(X), BRANCHES["cpu"](X), rtol=1e-5)
    self.assertRunsAs(f, {p: BRANCHES[p] for p in ("cuda", "tpu", "cpu")}, X,
                      rtol=1e-5)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
