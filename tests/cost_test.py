"""Tests what platform conditionals cost, by counts and sizes, never by time.

What they take in seconds is measured in `benchmarks/`.
"""
import collections
import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src import xla_bridge
from jax.interpreters import ad
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch import sharing
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.ones((4, 4), np.float32)
PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "other1", "other2", "other3",
             "other4")


def layer(x, w, scale):
  return jnp.tanh(x @ w) * scale


def model(num_branches, platforms=PLATFORMS):
  """A model of layers; each has a branch for each platform."""
  def f(x, ws):
    for w in ws:
      x = lax.platform_dependent(x, w, **{
          platform: lambda x, w, i=i: layer(x, w, i + 1.5)
          for i, platform in enumerate(platforms[:num_branches])})
    return x
  return f


def direct(x, ws):
  for w in ws:
    x = layer(x, w, 1.5)
  return x


def scanned(f):
  def g(x, ws):
    return lax.scan(lambda x, w: (f(x, [w]), None), x, jnp.stack(ws))[0]
  return g


def differentiated(f):
  return jax.grad(lambda x, ws: f(x, ws).sum(), argnums=(0, 1))


def mapped(f):
  return jax.vmap(f, in_axes=(0, None))


TRANSFORMATIONS = dict(
    forward=lambda f: f,
    gradient=differentiated,
    forward_mode=lambda f: lambda x, ws: jax.jvp(f, (x, ws), (x, ws)),
    vmap=lambda f: lambda x, ws: mapped(f)(jnp.stack([x, x]), ws),
    scan=scanned,
    gradient_of_jit=lambda f: differentiated(jax.jit(lambda *args: f(*args))),
    gradient_of_scan=lambda f: differentiated(scanned(f)),
    gradient_of_remat=lambda f: differentiated(jax.checkpoint(f)))


def num_ops(f, *args, platforms=("cpu",)):
  text = tu.lower(lambda *args: f(*args), *args, platforms=platforms)
  return text.count(" = ")


class OperationsTest(tu.JcpTestCase):

  @parameterized.product(
      transformation=list(TRANSFORMATIONS), num_branches=[1, 4])
  def test_one_platform(self, transformation, num_branches):
    """A module has the operations that it has without conditionals."""
    transform = TRANSFORMATIONS[transformation]
    ws = [X, X + 1]
    self.assertEqual(num_ops(transform(model(num_branches)), X, ws),
                     num_ops(transform(direct), X, ws))

  @parameterized.product(
      transformation=list(TRANSFORMATIONS),
      platforms=[("cpu",), ("cpu", "tpu", "cuda", "rocm")])
  def test_growth_with_sites(self, transformation, platforms):
    f = TRANSFORMATIONS[transformation](model(8))
    first, second, third = (
        num_ops(f, X, [X] * n, platforms=platforms) for n in (2, 3, 4))
    self.assertEqual(third - second, second - first)

  def test_growth_with_branches(self):
    """What is not reached does not count."""
    num_ops_of = lambda n, num_platforms: num_ops(
        model(n), X, [X] * 2, platforms=PLATFORMS[:num_platforms])
    self.assertEqual(num_ops_of(8, 2), num_ops_of(2, 2))
    self.assertEqual(num_ops_of(8, 4), num_ops_of(4, 4))
    self.assertEqual(num_ops_of(4, 4) - num_ops_of(3, 3),
                     num_ops_of(3, 3) - num_ops_of(2, 2))


class ResidualsTest(tu.JcpTestCase):

  def heavy(self, x):
    for _ in range(4):
      x = jnp.sin(jnp.outer(x, x)).sum(1)
    return x

  def num_bytes(self, f, place=np.asarray):
    """What the vjp of a function holds, outside of `jax.jit`."""
    _, vjp = jax.vjp(f, place(np.ones(64, np.float32)))
    return sum(np.asarray(x).nbytes for x in jax.tree_util.tree_leaves(vjp))

  @parameterized.named_parameters(
      ("jit", jax.jit),
      ("jit_in_jit", lambda f: jax.jit(lambda x: jax.jit(f)(x))),
      ("scan", lambda f: lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=2)[0]),
      ("scan_in_jit", lambda f: jax.jit(lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=2)[0])),
      ("jit_in_remat", lambda f: jax.checkpoint(jax.jit(f))),
      ("remat_that_saves_all", lambda f: jax.checkpoint(
          f, policy=jax.checkpoint_policies.everything_saveable)),
      ("conditional", lambda f: lambda x: lax.cond(
          x[0] > 0, f, lambda x: x, x)),
      ("jit_in_vmap", lambda f: lambda x: jax.vmap(jax.jit(f))(x[None])[0]),
  )
  @jtu.run_on_devices("cpu")
  def test_of_what_runs(self, transform):
    """A vjp holds what that of the branch holds that is called directly."""
    f = transform(lambda x: lax.platform_dependent(
        x, cpu=jnp.sin, default=self.heavy))
    direct = transform(lambda x: jnp.sin(x))
    self.assertEqual(self.num_bytes(f), self.num_bytes(direct))
    x = np.linspace(1, 2, 64, dtype=np.float32)
    self.assertAllClose(jax.grad(lambda x: f(x).sum())(x),
                        jax.grad(lambda x: direct(x).sum())(x), rtol=1e-6)

  @parameterized.named_parameters(
      ("numpy", lambda f: f, np.asarray),
      ("committed", lambda f: f,
       lambda x: jax.device_put(x, jax.devices()[0])),
      ("constraint", lambda f: lambda x: lax.with_sharding_constraint(
          f(x), jax.sharding.SingleDeviceSharding(jax.devices()[0])),
       np.asarray),
  )
  @jtu.run_on_devices("cpu")
  def test_where_there_are_two_backends(self, constrain, place):
    """Then it is to be found out on which of them a program runs."""
    f = jax.jit(constrain(lambda x: lax.platform_dependent(
        x, cpu=jnp.sin, default=self.heavy)))
    direct = jax.jit(constrain(lambda x: jnp.sin(x)))
    backends = xla_bridge.backends()
    with mock.patch.object(
        xla_bridge, "backends",
        lambda: {**backends, "another": backends["cpu"]}):
      self.assertEqual(self.num_bytes(f, place), self.num_bytes(direct, place))

  def test_of_what_is_traced(self):
    """Nothing is decided while a program is traced, also of constants."""
    f = jax.jit(lambda x: lax.platform_dependent(
        x, cpu=jnp.sin, default=lambda x: x * 3))
    for g in (lambda x: jax.vjp(f, x)[1](x),
              lambda x: jax.vjp(f, np.ones(64, np.float32))[1](x)):
      x = np.ones(64, np.float32)
      self.assertIn("case", tu.lower(g, x, platforms=("cpu", "tpu")))

  def test_of_other_platforms(self):
    """What runs on no platform with a branch raises as it is differentiated."""
    f = jax.jit(lambda x: lax.platform_dependent(x, other=jnp.sin))
    with self.assertRaisesRegex(NotImplementedError, "has no branch for"):
      jax.vjp(f, np.ones(64, np.float32))

  @parameterized.parameters("default", "tpu")
  def test_pinned(self, unreachable):
    def f(x):
      return lax.platform_dependent(
          x, cpu=jnp.sin, **{unreachable: self.heavy}).sum()
    expected = self.num_bytes(jax.jit(lambda x: jnp.sin(x).sum()))
    self.addCleanup(jax_cond_patch.pin, None)
    jax_cond_patch.pin("cpu")
    self.assertEqual(self.num_bytes(jax.jit(f)), expected)

  def test_within_one_program(self):
    """Where the platforms are known, nothing of the other branch is left."""
    def gradient(f):
      return jax.grad(jax.jit(lambda x: f(x).sum()))
    x = np.ones(64, np.float32)
    f = lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=self.heavy)
    text = tu.lower(gradient(f), x, platforms=("cpu",))
    self.assertNotIn("64x64", text)
    self.assertEqual(text.count(" = "), num_ops(gradient(jnp.sin), x))


def counted():
  """A primitive that multiplies by 2, and how often its jvp is taken."""
  primitive = core.Primitive("counted")
  primitive.def_abstract_eval(lambda x: x)
  mlir.register_lowering(
      primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
  calls = []
  def jvp(primals, tangents):
    calls.append(None)
    return primitive.bind(*primals), tangents[0] * 2
  ad.primitive_jvps[primitive] = jvp
  return primitive.bind, calls


def branches_of(f, *args):
  """The branches of the platform conditionals in a function."""
  eqns = tu.find_eqns(jax.make_jaxpr(f)(*args), "cond")
  return [eqn.params["branches"] for eqn in eqns
          if eqn.params.get(tu.PLATFORMS)]


def transformed_branches_of(f, x):
  return branches_of(lambda x: jax.jvp(f, (x,), (x,)), x)


@st.composite
def constants_of_layers(draw):
  """Three constants each, of one type; many are alike."""
  dtype = draw(st.sampled_from([
      float, np.float16, np.float32, jnp.bfloat16]))
  value = st.sampled_from(
      [0., -0., 1., 2., 3., .5, 1.5, float("inf"), float("nan")]).map(dtype)
  return draw(st.lists(st.tuples(value, value, value), min_size=3, max_size=5))


def canonical(x):
  """What a jaxpr says, whichever variables it has and shares with others."""
  if isinstance(x, (tuple, list)):
    return [canonical(y) for y in x]
  x = getattr(x, "jaxpr", x)  # of a closed one
  if not isinstance(x, core.Jaxpr):
    return str(x)
  numbers = collections.defaultdict(itertools.count().__next__)
  def numbered(atoms):
    return [f"{x.val!r}: {x.aval}" if isinstance(x, core.Literal) else
            f"{numbers[x]}: {x.aval}" for x in atoms]
  return [
      numbered(x.invars),
      [(eqn.primitive.name, numbered(eqn.invars), numbered(eqn.outvars),
        {name: canonical(param) for name, param in eqn.params.items()})
       for eqn in x.eqns],
      numbered(x.outvars)]


class SharingTest(tu.JcpTestCase):

  def assertShared(self, branches):
    first, *others = branches
    self.assertNotEmpty(others)
    for other in others:
      for a, b in zip(first, other):
        self.assertIs(a, b)

  def assertNotShared(self, branches):
    first, second = branches
    self.assertIsNot(first[0], second[0])

  @parameterized.parameters("gradient", "forward_mode", "vmap")
  def test_layers(self, transformation):
    transform = TRANSFORMATIONS[transformation]
    branches = branches_of(transform(model(4)), X, [X] * 3)
    # All that the backward pass needs are the residuals of each branch.
    self.assertShared(branches[:3])

  def test_with_helpers_in_branches(self):
    @jax.jit
    def helper(x):
      return jax.nn.relu(jnp.sin(x))
    def f(x):
      for _ in range(3):
        x = lax.platform_dependent(
            x, cpu=lambda x: helper(helper(x)),
            default=lambda x: lax.fori_loop(0, 3, lambda i, x: x * 2, x))
      return x
    self.assertShared(transformed_branches_of(f, X))

  @parameterized.parameters(
      (2., 3.), (0., -0.), (float("nan"), 1.))
  def test_other_constants(self, first, second):
    def f(x):
      for value in (first, second):
        x = lax.platform_dependent(
            x, cpu=lambda x: x * value, default=lambda x: x)
      return x
    self.assertNotShared(transformed_branches_of(f, X))

  @parameterized.parameters(
      "gradient", "forward_mode", "vmap", "gradient_of_remat")
  def test_one_transformation_for_all_constants(self, transformation):
    transform = TRANSFORMATIONS[transformation]
    def num_traced(num_sites, transform):
      def f(x, ws):
        for i, w in enumerate(ws):
          x = lax.platform_dependent(
              x, w, cpu=lambda x, w, i=i: lax.tanh(x @ w) * (i + 1.5),
              default=lambda x, w: x + w)
        return x
      jax.clear_caches()
      with mock.patch.object(
          lax.tanh_p, "bind", side_effect=lax.tanh_p.bind) as bind:
        jax.make_jaxpr(transform(f))(X, [X] * num_sites)
      return bind.call_count
    self.assertEqual(num_traced(5, lambda f: f), 5)
    self.assertGreater(num_traced(1, transform), 1)
    # Each is only traced before it is found to be like the others.
    self.assertEqual(
        num_traced(8, transform) - num_traced(4, transform), 4)

  @hypothesis.settings(
      max_examples=25, deadline=None, derandomize=True, database=None,
      suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(constants_of_layers(), st.sampled_from(
      ["gradient", "forward_mode", "vmap", "gradient_of_scan"]))
  # Alike or equal in the first two, and not in the third.
  @hypothesis.example([(1., 1., 2.), (3., 3., 4.), (5., 6., 7.)], "gradient")
  @hypothesis.example([(1., 2., 3.), (1., 4., 5.), (6., 7., 8.)], "gradient")
  @hypothesis.example([(0., 1., 3.), (-0., 2., 4.), (0., 5., 5.)], "vmap")
  def test_constants_are_put_in_place(self, constants, transformation):
    """As if each branch had been transformed by itself."""
    def f(x, _):
      x = x.astype(jnp.result_type(constants[0][0]))
      for a, b, c in constants:
        x = lax.platform_dependent(
            x,
            cpu=lambda x: jnp.maximum(x * a, b) / c - (x > a).astype(x.dtype),
            default=lambda x: jnp.where(x < c, a, x - b) * a)
      return x.astype(np.float32)

    def traced():
      jax.clear_caches()
      transformed = TRANSFORMATIONS[transformation](f)
      return canonical(jax.make_jaxpr(transformed)(X, [X]))
    jaxpr = traced()
    with mock.patch.object(sharing, "_General", side_effect=ValueError):
      self.assertEqual(jaxpr, traced())

  def test_constants_of_functions(self):
    """A rule of the user's may compute with a constant as it is traced."""
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x, exponent):
      return x ** exponent

    @power.defjvp
    def power_jvp(exponent, primals, tangents):
      x, = primals
      t, = tangents
      return x ** exponent, exponent * x ** (exponent - 1) * t

    def f(x, exponents=(1.5, 2.5, 3.5, 4.5, 5.5)):
      return sum(lax.platform_dependent(
          x, cpu=lambda x: power(x, exponent) * exponent, default=lambda x: x)
                 for exponent in exponents)
    self.assertAllClose(
        jax.jit(jax.grad(lambda x: f(x)))(np.float32(2)),
        np.float32(sum(e * e * 2 ** (e - 1)
                       for e in (1.5, 2.5, 3.5, 4.5, 5.5))))

  def test_other_params(self):
    def f(x):
      for exponent in (2, 3):
        x = lax.platform_dependent(
            x, cpu=lambda x: lax.integer_pow(x, exponent), default=lambda x: x)
      return x
    self.assertNotShared(transformed_branches_of(f, X))

  def test_other_lines(self):
    """Errors and profiles say where the code is."""
    def f(x):
      x = lax.platform_dependent(x, cpu=lambda x: x * 2, default=lambda x: x)
      x = lax.platform_dependent(x, cpu=lambda x: x * 2, default=lambda x: x)
      return x
    self.assertNotShared(transformed_branches_of(f, X))

  def test_functions_in_branches(self):
    """A function of the user's is not compared, nor kept alive."""
    def f(x):
      for scale in (2., 3.):
        scaled = jax.custom_jvp(lambda x: x * scale)
        scaled.defjvps(lambda t, ans, x: t * scale)
        x = lax.platform_dependent(x, cpu=scaled, default=lambda x: x)
      return x
    self.assertNotShared(transformed_branches_of(f, X))
    self.assertAllClose(jax.jit(jax.grad(lambda x: f(x).sum()))(X), X * 6)

  @parameterized.parameters("gradient", "forward_mode", "gradient_of_remat")
  def test_branches_are_differentiated_once(self, transformation):
    def num_calls(num_sites):
      double, calls = counted()
      def f(x, ws):
        for w in ws:
          x = lax.platform_dependent(
              x, w, cpu=lambda x, w: double(x @ w), default=lambda x, w: x + w)
        return x
      jax.make_jaxpr(TRANSFORMATIONS[transformation](f))(X, [X] * num_sites)
      return len(calls)
    self.assertGreater(num_calls(1), 0)
    self.assertEqual(num_calls(5), num_calls(1))

  def test_branches_are_compared_once(self):
    """Also those of branches in branches."""
    def nested(depth, x):
      if not depth:
        return x * 2
      return lax.platform_dependent(
          x, cpu=lambda x: nested(depth - 1, x) * jnp.sin(x),
          default=lambda x: x)
    def num_compared(depth):
      jax.clear_caches()
      with mock.patch.object(
          sharing, "_structure", side_effect=sharing._structure) as compared:
        jax.make_jaxpr(jax.grad(lambda x: nested(depth, x).sum()))(X)
      return compared.call_count
    self.assertGreater(num_compared(5), 0)
    self.assertLess(num_compared(10), 3 * num_compared(5))

  def test_name_scopes(self):
    """Equations of a shared branch have the name of each place."""
    def f(x):
      for i in range(2):
        with jax.named_scope(f"layer{i}"):
          x = lax.platform_dependent(
              x, cpu=lambda x: jnp.sin(x) * 2.5, default=lambda x: x)
      return x
    module = jax.jit(f).lower(X).compiler_ir()
    text = module.operation.get_asm(enable_debug_info=True)
    for i in range(2):
      self.assertRegex(text, rf"layer{i}/.*mul")


if __name__ == "__main__":
  absltest.main()
