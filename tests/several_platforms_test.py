"""Tests that a module for several platforms is right on each."""
import dataclasses
import functools
import itertools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import ad_checkpoint
from jax._src import config
from jax._src import core
from jax._src import effects
from jax._src import test_util as jtu
from jax._src.interpreters import mlir as mlir_internals
from jax._src.lib.mlir.dialects import hlo
from jax.experimental import io_callback
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4
PLATFORMS = ("tpu", "cpu", "cuda")
BRANCHES = dict(cpu=tu.marked(1.25), cuda=tu.marked(2.25),
                rocm=tu.marked(3.25), tpu=tu.marked(4.25))


def choose(x):
  return lax.platform_dependent(x, **BRANCHES)


def times(platform: str, count: int):
  """What `count` calls of `choose` compute on a platform."""
  def f(x):
    for _ in range(count):
      x = BRANCHES[platform](x)
    return x
  return f


def per_platform_primitive(name: str, default, **rules) -> core.Primitive:
  """A primitive with a lowering rule for each platform, made of a function."""
  primitive = core.Primitive(name)
  primitive.def_abstract_eval(lambda x: x)
  for platform, rule in rules.items():
    mlir.register_lowering(primitive, mlir.lower_fun(
        rule, multiple_results=False), platform=platform)
  mlir.register_lowering(
      primitive, mlir.lower_fun(default, multiple_results=False))
  return primitive


def custom_jvp(f):
  f = jax.custom_jvp(f)
  f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
  return f


def custom_vjp(f):
  f = jax.custom_vjp(f)
  f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
  return f


def custom_vmap(f):
  f = jax.custom_batching.custom_vmap(f)
  f.def_vmap(lambda axis_size, in_batched, x: (jax.vmap(f)(x), in_batched[0]))
  return f


def sharded(f, mesh):
  spec = jax.sharding.PartitionSpec("i")
  return tu.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec,
                      check=tu.has("checked_shard_map"))


def shard_map(f):
  return sharded(f, jax.sharding.Mesh(jax.devices()[:1], "i"))


# Each calls a function once, in a jaxpr of its own.
WRAPS = dict(
    jit=jax.jit,
    jit_inline=functools.partial(jax.jit, inline=True),
    nested_jit=lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    custom_jvp=custom_jvp,
    custom_vjp=custom_vjp,
    custom_vmap=custom_vmap,
    remat=jax.checkpoint,
    named_call=lambda f: jax.named_call(f, name="named"),
    scan=lambda f: lambda x: lax.scan(
        lambda c, _: (f(c), None), x, None, length=1)[0],
    # Unrolled, its body is a closed call.
    closed_call=lambda f: lambda x: lax.scan(
        lambda c, i: (lax.select(i == 0, f(c), c), None), x, jnp.arange(2),
        unroll=2)[0],
    fori=lambda f: lambda x: lax.fori_loop(0, 1, lambda _, c: f(c), x),
    while_=lambda f: lambda x: lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    cond=lambda f: lambda x: lax.cond(x[0] < 99, f, lambda x: x, x),
    map=lambda f: lambda x: lax.map(f, x),
    vmap=lambda f: jax.vmap(f),
    shard_map=shard_map,
)


def _can_export_composites() -> bool:
  """JAX 0.6.0 has no composites in a module for several platforms."""
  try:
    tu.lower(lax.composite(jnp.sin, name="test.sin"), X, platforms=PLATFORMS)
  except (AttributeError, ValueError):
    return False
  return True


def _has_gpu_random_numbers() -> bool:
  """JAX 0.4.26 and earlier need jaxlib's code for GPUs to lower them."""
  try:
    tu.lower(lambda key: jax.random.bits(key), jax.random.key(3),
             platforms=("cuda",))
  except Exception as e:
    if "not built with GPU support" not in str(e):
      raise
    return False
  return True


if _can_export_composites():
  WRAPS["composite"] = lambda f: lax.composite(f, name="test.composite")


class NarrowingTest(tu.JcpTestCase):
  """What is lowered for some of the platforms serves no others."""

  @parameterized.parameters(*WRAPS)
  def test_shared_by_arms(self, wrap):
    shared = WRAPS[wrap](choose)
    def f(x):
      x = shared(x)
      x = lax.platform_dependent(
          x, cpu=lambda x: shared(x), default=lambda x: shared(shared(x)))
      return shared(x)
    self.assertRunsAs(f, dict(cpu=times("cpu", 3), cuda=times("cuda", 4),
                              tpu=times("tpu", 4)), X, rtol=1e-5)

  @parameterized.parameters(*WRAPS)
  def test_shared_by_lowering_rules(self, wrap):
    shared = WRAPS[wrap](choose)
    primitive = per_platform_primitive(
        f"shares_{wrap}", lambda x: shared(shared(x)), cpu=lambda x: shared(x))
    f = lambda x: shared(primitive.bind(shared(x)))
    self.assertRunsAs(f, dict(cpu=times("cpu", 3), cuda=times("cuda", 4),
                              tpu=times("tpu", 4)), X, rtol=1e-5)

  @parameterized.parameters(*(w for w in WRAPS if w != "shard_map"))
  def test_shared_with_the_host(self, wrap):
    self.requires("compute_on")
    shared = WRAPS[wrap](choose)
    f = lambda x: shared(tu.on_host(shared)(shared(x)))
    for platforms in (PLATFORMS, ("cuda", "tpu")):
      self.assertRunsAs(f, {p: lambda x, p=p: times(p, 1)(
          times("cpu", 1)(times(p, 1)(x))) for p in platforms}, X, rtol=1e-5)

  def test_narrowing_in_narrowing(self):
    """Conditionals and lowering rules in each other, in every order."""
    helper = jax.jit(choose)
    two = per_platform_primitive(
        "two", lambda x: lax.platform_dependent(
            helper(x), rocm=helper, tpu=lambda x: helper(x) + 2,
            cuda=lambda x: helper(x) + 3),
        cpu=lambda x: helper(x) + 1)
    def f(x):
      return helper(lax.platform_dependent(
          helper(x), rocm=lambda x: helper(x) + 4,
          default=lambda x: helper(two.bind(helper(x)))))
    m = BRANCHES
    expected = dict(
        cpu=lambda x: times("cpu", 2)(times("cpu", 3)(x) + 1),
        tpu=lambda x: times("tpu", 2)(times("tpu", 4)(x) + 2),
        cuda=lambda x: times("cuda", 2)(times("cuda", 4)(x) + 3),
        rocm=lambda x: m["rocm"](times("rocm", 2)(x) + 4))
    for platforms in (*itertools.permutations(("cpu", "cuda", "tpu")),
                      ("rocm", "cuda", "cpu", "tpu")):
      self.assertRunsAs(f, {p: expected[p] for p in platforms}, X, rtol=1e-5)

  def test_functions_that_operators_take(self):
    pick = lambda a, b: lax.platform_dependent(
        a, b, cpu=lambda a, b: a + b, default=lambda a, b: a * b)
    self.assertRunsAs(
        lambda x: lax.associative_scan(pick, x), dict(
            cpu=np.cumsum, cuda=np.cumprod, tpu=np.cumprod), X)
    self.assertRunsAs(
        lambda x: lax.reduce(x, np.float32(1), pick, (0,)), dict(
            cpu=lambda x: 1 + x.sum(), cuda=np.prod, tpu=np.prod), X)
    solve = lambda x: lax.custom_linear_solve(
        lambda v: v * 2, x, lambda _, b: choose(b) / 2, symmetric=True)
    self.assertRunsAs(
        solve, {p: lambda x, p=p: BRANCHES[p](x) / 2 for p in PLATFORMS}, X,
        rtol=1e-5)

  @tu.requires("exported_refs")
  def test_references(self):
    new_ref = getattr(jax, "new_ref", None) or core.mutable_array
    def f(x):
      ref = new_ref(x)
      def adds(a):
        def g(y):
          ref[...] = ref[...] + a * y
          return y * a
        return g
      y = lax.platform_dependent(
          x, cpu=adds(2.), tpu=lambda y: adds(3.)(adds(4.)(y)),
          default=lambda y: lax.platform_dependent(
              y, rocm=adds(5.), cuda=adds(6.), default=adds(7.)))
      return y + ref[...]
    self.assertRunsAs(f, dict(
        cuda=lambda x: 6 * x + 7 * x, cpu=lambda x: 2 * x + 3 * x,
        rocm=lambda x: 5 * x + 6 * x, tpu=lambda x: 12 * x + 17 * x), X)

  def test_random_numbers(self):
    """Their primitives have lowering rules for some of the platforms."""
    # From JAX 0.4.22 to 0.4.25 its test case refuses a key that is used twice.
    if hasattr(config, "enable_key_reuse_checks"):
      self.enter_context(config.enable_key_reuse_checks(False))
    key = jax.random.key(3)
    uniform = lambda x: x + jax.random.uniform(key, x.shape)
    normal = lambda x: x + jax.random.normal(key, x.shape)
    f = lambda x: uniform(lax.platform_dependent(
        x, tpu=lambda x: uniform(normal(x)), default=lambda x: normal(x)))
    platforms = PLATFORMS if _has_gpu_random_numbers() else ("tpu", "cpu")
    exported = tu.export(jax.jit(f), platforms=platforms)(X)
    u, n = jax.random.uniform(key, X.shape), jax.random.normal(key, X.shape)
    for platform, expected in dict(cpu=X + n + u, tpu=X + n + u + u).items():
      np.testing.assert_allclose(
          tu.run_as(exported, platform, X), expected, rtol=1e-5)

  @parameterized.parameters(False, True)
  def test_64_bit_numbers(self, enabled):
    """The platform index is an integer of the default size."""
    with config.enable_x64(enabled):
      text = tu.lower(choose, X, platforms=PLATFORMS)
      self.assertIn(f"tensor<i{64 if enabled else 32}>", text)
      self.test_narrowing_in_narrowing()
      self.test_symbolic_shapes_in_narrowed_arms()

  def test_symbolic_shapes_in_narrowed_arms(self):
    """The platform index stands before the dimension variables."""
    @jax.jit
    def helper(x):
      return choose(x) * .1 * x.shape[0] + x.shape[1]
    primitive = per_platform_primitive(
        "has_shape", lambda x: helper(x) + x.shape[1],
        cpu=lambda x: helper(x) + x.shape[0])
    def f(x):
      x = lax.platform_dependent(
          helper(x), tpu=lambda x: helper(x) + 2 * x.shape[0],
          default=lambda x: primitive.bind(helper(primitive.bind(x))))
      return lax.fori_loop(
          0, x.shape[0], lambda i, c: helper(c) + x.shape[1], x)
    exported = tu.export(jax.jit(f), platforms=PLATFORMS)(
        jax.ShapeDtypeStruct(tu.symbolic_shape("a, b"), np.float32))
    for shape in ((1, 3), (3, 2)):
      a, b = shape
      x = np.linspace(0, 1, a * b, dtype=np.float32).reshape(shape)
      for platform in PLATFORMS:
        h = lambda y: BRANCHES[platform](y) * .1 * a + b
        extra = a if platform == "cpu" else b
        y = h(x)
        if platform == "tpu":
          y = h(y) + 2 * a
        else:
          y = h(h(h(y) + extra)) + extra
        for _ in range(a):
          y = h(y) + b
        np.testing.assert_allclose(
            tu.run_as(exported, platform, x), y, rtol=1e-3, err_msg=platform)

  def test_donated_and_aliased_arguments(self):
    def f(x, y):
      return choose(x) + y, lax.platform_dependent(
          y, cpu=lambda y: y, default=lambda y: choose(y))
    exported = tu.export(
        jax.jit(f, donate_argnums=(0, 1)), platforms=PLATFORMS)(X, X)
    direct = tu.export(jax.jit(
        lambda x, y: (jnp.sin(x) + y, jnp.sin(y)), donate_argnums=(0, 1)),
                           platforms=PLATFORMS)(X, X)
    donation = r"tf.aliasing_output = \d+|jax.buffer_donor = true"
    donations = re.findall(donation, exported.mlir_module())
    self.assertLen(donations, 2)
    self.assertEqual(donations, re.findall(donation, direct.mlir_module()))
    for platform in PLATFORMS:
      outs = tu.run_as(exported, platform, X, 2 * X)
      m = BRANCHES[platform]
      np.testing.assert_allclose(outs[0], m(X) + 2 * X, rtol=1e-5)
      np.testing.assert_allclose(
          outs[1], 2 * X if platform == "cpu" else m(2 * X), rtol=1e-5)

  def test_shardings(self):
    result = tu.run_python("""
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax_cond_patch
        import jax, jax.numpy as jnp, numpy as np
        from jax import lax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import jcp_test_util as tu
        import several_platforms_test as t
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"))
        sharding = NamedSharding(mesh, P("i", "j"))
        x = jax.device_put(
            np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8), sharding)
        @jax.jit
        def helper(x):
          x = lax.with_sharding_constraint(
              x, NamedSharding(mesh, P("j", "i")))
          return t.choose(x)
        primitive = t.per_platform_primitive(
            "sharded", lambda x: helper(helper(x)), cpu=lambda x: helper(x))
        def f(x):
          x = lax.platform_dependent(
              helper(x), tpu=lambda x: helper(x), default=primitive.bind)
          return helper(x)
        assert len(x.sharding.device_set) == 8
        m = t.BRANCHES
        count = dict(cpu=3, tpu=3, cuda=4)
        exported = tu.export(
            jax.jit(f, in_shardings=sharding, out_shardings=sharding),
            platforms=t.PLATFORMS)(x)
        assert exported.nr_devices == 8
        for p in t.PLATFORMS:
          y = tu.run_as(exported, p, x)
          np.testing.assert_allclose(y, t.times(p, count[p])(x), rtol=1e-5)
        # By hand, with communication in some of the branches.
        def g(x):
          def sums(x):
            return x + jax.lax.psum(t.choose(x), "i") * .1
          return lax.platform_dependent(
              x, tpu=lambda x: x, default=lambda x: lax.platform_dependent(
                  x, cpu=sums, default=lambda x: sums(sums(x))))
        exported = tu.export(
            jax.jit(t.sharded(g, mesh)), platforms=t.PLATFORMS)(x)
        def sums(p, x):
          total = t.BRANCHES[p](x).reshape(4, 2, 8).sum(0) * .1
          return x + jnp.tile(total, (4, 1))
        for p, expected in dict(tpu=x, cpu=sums("cpu", x), cuda=sums(
            "cuda", sums("cuda", x))).items():
          np.testing.assert_allclose(
              tu.run_as(exported, p, x), expected, rtol=1e-5)
        y = jax.jit(f, out_shardings=sharding)(x)
        assert y.sharding == sharding
        np.testing.assert_allclose(y, t.times("cpu", 3)(x), rtol=1e-5)
        """, PYTHONPATH=tu.python_path())
    self.assertEqual(result.returncode, 0, result.stderr)


class SharingTest(tu.JcpTestCase):
  """Inside of one set of platforms, what is the same is lowered once."""

  @parameterized.parameters("jit", "nested_jit")
  def test_layers_share_a_helper(self, wrap):
    layer = WRAPS[wrap](choose)
    def model(x):
      for _ in range(100):
        x = layer(x)
      return x
    primitive = per_platform_primitive(f"layers_{wrap}", model, rocm=model)
    f = lambda x: model(lax.platform_dependent(
        x, tpu=lambda x: model(x), default=lambda x: model(primitive.bind(x))))
    text = tu.lower(f, X, platforms=("cpu", "cuda", "rocm", "tpu"))
    # All four, tpu, the other three, rocm, cpu with cuda; each has an arm for
    # each of its platforms.
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 4 + 1 + 3 + 1 + 2)

  def test_module_without_narrowing_is_as_without(self):
    @jax.jit
    def layer(x):
      return jnp.sin(x) * jnp.cos(x).sum()
    def f(checkpoint, x):
      for _ in range(10):
        x = layer(x)
      x = checkpoint(layer)(x)
      return lax.scan(lambda c, _: (layer(c), custom_vjp(layer)(c)), x, None,
                      length=2)
    for platforms in (("cpu",), ("tpu",), ("cuda", "tpu", "cpu")):
      # Up to JAX 0.5.3 it has a lowering rule of its own for GPUs, and then is
      # as in the next test.
      has_rules = (
          ad_checkpoint.remat_p in
          mlir_internals._platform_specific_lowerings["cuda"])
      checkpoint = (custom_jvp if has_rules and len(platforms) > 1 else
                    jax.checkpoint)
      self.assertSameModuleAsWithout(
          functools.partial(f, checkpoint), X, platforms=platforms)

  def test_lowering_rules_without_conditionals(self):
    """They are as without, but that each has its own helpers."""
    @jax.jit
    def layer(x):
      return jnp.sin(x)
    primitive = per_platform_primitive(
        "plain", lambda x: layer(layer(x)), cpu=lambda x: layer(x) * 2)
    f = lambda x: primitive.bind(primitive.bind(layer(x)))
    for platform in PLATFORMS:
      self.assertSameModuleAsWithout(f, X, platforms=(platform,))
    text = tu.lower(f, X, platforms=PLATFORMS)
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 3)


# Exports can have ordered effects of others than callbacks.
@dataclasses.dataclass(frozen=True)
class Order(effects.Effect):
  __str__ = lambda self: "Order"

  def __hash__(self):
    return hash(Order)


@dataclasses.dataclass(frozen=True)
class OtherOrder(effects.Effect):
  __str__ = lambda self: "OtherOrder"

  def __hash__(self):
    return hash(OtherOrder)


for _order in (Order, OtherOrder):
  effects.ordered_effects.add_type(_order)
  effects.lowerable_effects.add_type(_order)
  effects.control_flow_allowed_effects.add_type(_order)
  effects.remat_allowed_effects.add_type(_order)
  effects.custom_derivatives_allowed_effects.add_type(_order)


def step_primitive(effect) -> core.Primitive:
  """A primitive that multiplies by 2 and hands the token of its effect on."""
  primitive = core.Primitive(f"step_{effect}")
  primitive.def_effectful_abstract_eval(lambda x: (x, {effect}))
  def lowering(ctx, x):
    token = ctx.tokens_in.get(effect)
    if internals.values_are_lists:
      token = [hlo.after_all(token)]
    else:
      token = hlo.after_all([token])
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(
        mlir.TokenSet({effect: token})))
    return [hlo.add(x, x)]
  mlir.register_lowering(primitive, lowering)
  # The same code, but lowered on its own for the CPU.
  mlir.register_lowering(primitive, lambda ctx, x: lowering(ctx, x),
                         platform="cpu")
  return primitive


STEP = step_primitive(Order())
OTHER_STEP = step_primitive(OtherOrder())


class OrderedEffectsTest(tu.JcpTestCase):

  def after_alls(self, text):
    return tu.count_ops(text, "stablehlo.after_all")

  # JAX refuses effects in the others.
  @parameterized.parameters(*(w for w in WRAPS if w not in (
      "vmap", "map", "shard_map", "composite", "custom_vmap")))
  def test_in_some_arms(self, wrap):
    step = WRAPS[wrap](STEP.bind)
    def f(x):
      x = lax.platform_dependent(
          x, tpu=lambda x: step(x), rocm=lambda x: OTHER_STEP.bind(x),
          default=lambda x: x + 1)
      x = lax.platform_dependent(
          x, cuda=lambda x: step(OTHER_STEP.bind(step(x))),
          default=lambda x: x - 1)
      return step(x)
    exported = self.assertRunsAs(f, dict(
        tpu=lambda x: (x * 2 - 1) * 2, cuda=lambda x: (x + 1) * 16,
        cpu=lambda x: x * 2), X)
    self.assertLen(exported.ordered_effects, 2)
    again = tu.reloaded(exported)
    np.testing.assert_allclose(tu.run_as(again, "cuda", X), (X + 1) * 16)
    # Where nothing is reached that has the other effect, nothing is left of it.
    exported = tu.export(jax.jit(f), platforms=("tpu", "cpu"))(X)
    self.assertLen(exported.ordered_effects, 1)
    exported = tu.export(
        jax.jit(lambda x: lax.platform_dependent(
            x, rocm=step, default=lambda x: x)), platforms=("tpu", "cpu"))(X)
    self.assertEmpty(exported.ordered_effects)
    self.assertNotIn("token", exported.mlir_module())

  def test_in_loops_and_conditionals(self):
    def arms(x):
      return lax.platform_dependent(
          x, cpu=lambda x: STEP.bind(OTHER_STEP.bind(x)), cuda=STEP.bind,
          tpu=lambda x: lax.fori_loop(
              0, 2, lambda _, x: OTHER_STEP.bind(x), x))
    def f(x):
      x = lax.fori_loop(0, 2, lambda _, x: arms(x), x)
      x = lax.while_loop(lambda x: x[0] < 100, arms, x)
      x = lax.cond(x[0] > 0, arms, lambda x: x, x)
      return STEP.bind(jax.jit(arms)(x))
    def expected(factor):
      def g(x):
        x = x * factor ** 2
        while x[0] < 100:
          x = x * factor
        return x * factor ** 2 * 2
      return g
    self.assertRunsAs(
        f, dict(cpu=expected(4), cuda=expected(2), tpu=expected(4)), X)

  def test_in_lowering_rules(self):
    """Arms of `mlir.lower_per_platform` hand their tokens on."""
    primitive = core.Primitive("ordered_rules")
    primitive.def_effectful_abstract_eval(lambda x: (x, {Order()}))
    rule = lambda f: mlir.lower_fun(f, multiple_results=False)
    mlir.register_lowering(
        primitive, rule(lambda x: STEP.bind(x) + 1), platform="cpu")
    mlir.register_lowering(primitive, rule(lambda x: lax.platform_dependent(
        x, cuda=lambda x: STEP.bind(STEP.bind(x)),
        default=lambda x: STEP.bind(x))))
    f = lambda x: STEP.bind(primitive.bind(STEP.bind(x)))
    self.assertRunsAs(f, dict(
        cpu=lambda x: (x * 4 + 1) * 2, cuda=lambda x: x * 16,
        tpu=lambda x: x * 8), X)

  def test_the_order_of_the_tokens(self):
    """Each effect is one chain, through every arm."""
    f = lambda x: lax.platform_dependent(
        STEP.bind(x), cpu=STEP.bind, tpu=lambda x: STEP.bind(STEP.bind(x)),
        default=lambda x: x)
    text = tu.lower(f, X, platforms=("cpu", "tpu", "cuda"))
    # Two for `STEP` outside, since it has two rules; one each in its arms.
    self.assertEqual(self.after_alls(text), 2 + 1 + 2)
    case = re.findall(r"stablehlo.case", text)
    self.assertLen(case, 3, text)


def _callbacks():
  shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
  def then(f):
    return lambda x: (f(x), x + 1)[1]
  ignore = lambda x: None
  made = dict(pure=lambda x: jax.pure_callback(lambda x: x + 1, shape, x))
  for ordered in (False, True):
    o = "_ordered" if ordered else ""
    made[f"debug{o}"] = then(functools.partial(
        jax.debug.callback, ignore, ordered=ordered))
    made[f"print{o}"] = then(functools.partial(
        jax.debug.print, "{}", ordered=ordered))
    made[f"io{o}"] = functools.partial(
        io_callback, lambda x: x + 1, shape, ordered=ordered)
  return made


CALLBACKS = _callbacks()


def lower_several(f, platforms):
  # Not by an export, which takes no callbacks.
  return tu.lower_jitted(jax.jit(f), X, platforms=platforms).as_text()


class CallbacksTest(tu.JcpTestCase):
  """JAX lowers a callback for one platform at a time."""

  @parameterized.parameters(*CALLBACKS)
  @jtu.run_on_devices("cpu")
  def test_in_an_arm_for_the_cpu(self, name):
    callback = CALLBACKS[name]
    tokens = "ordered" in name
    arm = lambda f: lambda x: lax.platform_dependent(
        x, cpu=f, default=lambda x: x * 2)
    direct = tu.count_ops(lower_several(callback, ("cpu",)),
                          "stablehlo.custom_call")
    for f in (arm(callback), arm(jax.jit(callback)), jax.jit(arm(callback)),
              lambda x: lax.platform_dependent(
                  x, tpu=lambda x: x, default=arm(callback)),
              lambda x: lax.fori_loop(0, 2, lambda _, x: arm(callback)(x), x),
              lambda x: lax.cond(x[0] > 0, arm(callback), lambda x: x, x)):
      for platforms in (("cpu", "tpu"), ("cuda", "tpu", "cpu")):
        text = lower_several(f, platforms)
        self.assertEqual(tu.count_ops(text, "stablehlo.custom_call"), direct)
        self.assertEqual("token" in text, tokens, text)
      for platforms in (("tpu",), ("cuda", "tpu")):
        text = lower_several(f, platforms)
        self.assertNotIn("custom_call", text)
        self.assertNotIn("token", text)

  @parameterized.parameters(*CALLBACKS)
  @jtu.run_on_devices("cpu")
  def test_twice_in_a_row(self, name):
    arm = jax.jit(lambda x: lax.platform_dependent(
        x, cpu=CALLBACKS[name], default=lambda x: x * 2))
    text = lower_several(lambda x: arm(arm(x)), ("cpu", "tpu"))
    self.assertEqual("token" in text, "ordered" in name, text)
    self.assertAllClose(jax.jit(lambda x: arm(arm(x)))(X), X + 2)
    jax.effects_barrier()

  @jtu.run_on_devices("cpu")
  def test_on_the_host(self):
    self.requires("compute_on")
    text = lower_several(tu.on_host(CALLBACKS["pure"]), ("tpu", "cuda"))
    self.assertIn("callback", text)

  @parameterized.parameters(*CALLBACKS)
  @jtu.run_on_devices("cpu")
  def test_for_several_platforms(self, name):
    """It is the error of JAX, whether or not it is in a branch."""
    callback = CALLBACKS[name]
    f = lambda x: lax.platform_dependent(
        x, tpu=lambda x: x, default=callback)
    if (name.startswith(("debug", "print")) and
        not tu.has("backend_of_debug_callbacks")):
      text = lower_several(f, ("cpu", "tpu", "cuda"))
      for target in ("xla_python_cpu_callback", "xla_python_gpu_callback"):
        self.assertEqual(text.count(target), 1, text)
      return
    with self.assertRaises(Exception) as direct:
      lower_several(callback, ("cpu", "cuda"))
    with self.assertRaises(type(direct.exception)) as chosen:
      lower_several(f, ("cpu", "tpu", "cuda"))
    self.assertEqual(str(chosen.exception), str(direct.exception))


class CallExportedTest(tu.JcpTestCase):
  """Exported functions in branches that own just their platforms."""

  def exported(self, *platforms, f=choose):
    return tu.export(jax.jit(f), platforms=platforms)(X)

  @parameterized.parameters(
      *itertools.permutations(("cpu", "cuda", "tpu")), ("rocm", "cpu"),
      ("tpu", "cpu", "rocm", "cuda"))
  def test_each_branch_calls_its_own(self, *platforms):
    one, two = self.exported("tpu"), self.exported("rocm", "cuda", "cpu")
    def f(x):
      y = lax.platform_dependent(x, tpu=one.call, default=two.call)
      return jax.jit(lambda y: lax.platform_dependent(
          y, tpu=one.call, default=jax.jit(two.call)))(y)
    self.assertRunsAs(f, {p: times(p, 2) for p in platforms}, X, rtol=1e-5)
    self.assertAllClose(jax.jit(f)(X), times("cpu", 2)(X), rtol=1e-5)
    self.assertAllClose(f(X), times("cpu", 2)(X), rtol=1e-5)

  def test_in_lowering_rules(self):
    two = self.exported("tpu", "rocm", "cuda")
    primitive = per_platform_primitive(
        "calls_exported", lambda x: two.call(two.call(x)),
        cpu=self.exported("cpu").call)
    self.assertRunsAs(primitive.bind, dict(
        cuda=times("cuda", 2), cpu=times("cpu", 1), rocm=times("rocm", 2),
        tpu=times("tpu", 2)), X, rtol=1e-5)

  def test_ordered_effects(self):
    inner = self.exported(
        "tpu", "cuda", f=lambda x: STEP.bind(OTHER_STEP.bind(x)))
    arms = lambda x: lax.platform_dependent(x, cpu=STEP.bind,
                                            default=inner.call)
    f = lambda x: STEP.bind(lax.fori_loop(0, 2, lambda _, x: arms(x), x))
    self.assertRunsAs(f, dict(
        cpu=lambda x: x * 8, tpu=lambda x: x * 32, cuda=lambda x: x * 32), X)

  def test_gradient_of_a_serialized_module(self):
    exported = self.exported(*PLATFORMS, f=lambda x: choose(jax.jit(choose)(x)))
    vjp = tu.reloaded(exported, vjp_order=1).vjp()
    for p in PLATFORMS:
      value = {"cpu": 1.25, "cuda": 2.25, "tpu": 4.25}[p]
      np.testing.assert_allclose(
          tu.run_as(vjp, p, X, np.ones_like(X))[0],
          np.cos(np.sin(X) * value) * value * np.cos(X) * value, rtol=1e-4)

  def test_on_the_host(self):
    self.requires("compute_on")
    for inner in (self.exported("cpu"), self.exported("tpu", "cpu", "cuda")):
      f = lambda x: choose(tu.on_host(inner.call)(x))
      self.assertRunsAs(
          f, {p: lambda x, p=p: times(p, 1)(times("cpu", 1)(x))
              for p in PLATFORMS}, X, rtol=1e-5)

  def test_re_export(self):
    """Exported functions that call exported functions, with gradients."""
    tpu, others = self.exported("tpu"), self.exported("cuda", "cpu")
    f = lambda x: lax.platform_dependent(x, tpu=tpu.call, default=others.call)
    inner = self.exported("cpu", "tpu", "cuda", f=f)
    g = lambda x: lax.platform_dependent(
        x, rocm=BRANCHES["rocm"], default=lambda x: inner.call(x))
    platforms = ("rocm", "tpu", "cpu", "cuda")
    outer = self.exported(*platforms, f=lambda x: g(g(x)))
    outer = tu.reloaded(outer)
    for p in platforms:
      np.testing.assert_allclose(
          tu.run_as(outer, p, X), times(p, 2)(X), rtol=1e-5)
    outer = tu.export(
        jax.jit(jax.grad(lambda x: jnp.sin(lax.platform_dependent(
            x, cpu=BRANCHES["cpu"], tpu=BRANCHES["tpu"])).sum())),
        platforms=("tpu", "cpu"))(X)
    h = lambda x: lax.platform_dependent(
        x, rocm=lambda x: x, default=outer.call)
    self.assertRunsAs(h, {p: jax.grad(lambda x, p=p: jnp.sin(
        BRANCHES[p](x)).sum()) for p in ("cpu", "tpu")}, X, rtol=1e-4)

  def test_symbolic_shapes(self):
    shape = jax.ShapeDtypeStruct(tu.symbolic_shape("a, 4"), np.float32)
    inner = tu.export(jax.jit(lambda x: choose(x) + x.shape[0]),
                          platforms=("cuda", "cpu", "rocm"))(shape)
    f = lambda x: lax.platform_dependent(
        x, tpu=lambda x: x * x.shape[0], default=inner.call)
    shape = jax.ShapeDtypeStruct(tu.symbolic_shape("b, 4"), np.float32)
    exported = tu.export(jax.jit(f), platforms=PLATFORMS)(shape)
    for n in (1, 3):
      x = np.tile(X, (n, 1))
      for p in PLATFORMS:
        np.testing.assert_allclose(
            tu.run_as(exported, p, x),
            x * n if p == "tpu" else BRANCHES[p](x) + n, rtol=1e-5)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
