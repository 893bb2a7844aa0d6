"""Tests of conditionals whose index is known when they are lowered."""
from __future__ import annotations

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch import resolution
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4
PLATFORMS = ("cpu", "cuda", "tpu")
IF_FALSE, IF_TRUE = tu.marked(1.25), tu.marked(2.25)
THREE = [tu.marked(1.25), tu.marked(2.25), tu.marked(3.25)]

CONSTANT = {
    "bool": (False, True),
    "int": (0, 3),
    "numpy_bool": (np.bool_(False), np.bool_(True)),
    "numpy_array": (np.array(False), np.array(True)),
    "uint8": (np.uint8(0), np.uint8(1)),
}


def with_custom_jvp(f):
  @jax.custom_jvp
  def g(x):
    return f(x)
  g.defjvp(lambda primals, tangents: (g(*primals), *tangents))
  return g


WRAPS = dict(
    plain=lambda f: f,
    jit=jax.jit,
    vmap=jax.vmap,
    grad=lambda f: jax.grad(lambda x: f(x).sum()),
    jvp=lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    grad_of_jit=lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
    hessian=lambda f: jax.hessian(lambda x: f(x).sum()),
    scan=lambda f: lambda x: lax.scan(
        lambda c, _: (f(c), f(c)), x, None, length=3),
    grad_of_scan=lambda f: jax.grad(lambda x: lax.scan(
        lambda c, _: (f(c), None), x, None, length=3)[0].sum()),
    cond=lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    while_=lambda f: lambda x: lax.while_loop(
        lambda x: x[0] < 1, lambda x: f(x) + 1, x),
    fori=lambda f: lambda x: lax.fori_loop(0, 3, lambda _, x: f(x) + 1, x),
    remat=lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x) * 2).sum()),
    custom_jvp=with_custom_jvp,
)


def flag_of_platform():
  return lax.platform_dependent(tpu=lambda: True, default=lambda: False)


def kernel(interpret):
  def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1
  return pl.pallas_call(
      add_one, out_shape=jax.ShapeDtypeStruct((8, 128), np.float32),
      interpret=interpret)


class ModuleTest(tu.JcpTestCase):
  """The module is that of the branch taken."""

  @parameterized.parameters(*WRAPS)
  def test_module_is_that_of_the_branch(self, wrap):
    wrap = WRAPS[wrap]
    def choose(x):
      return lax.cond(False, IF_TRUE, IF_FALSE, x)
    def choose_directly(x):
      return IF_FALSE(x)
    choose_directly.__name__ = "choose"
    self.assertSameModule(wrap(choose), wrap(choose_directly), X)

  @parameterized.parameters(*CONSTANT)
  def test_kinds_of_flags(self, kind):
    for flag, branch in zip(CONSTANT[kind], (IF_FALSE, IF_TRUE)):
      self.assertSameModule(
          lambda x, flag=flag: lax.cond(flag, IF_TRUE, IF_FALSE, x), branch, X)

  @parameterized.parameters("plain", "jit", "scan", "grad", "grad_of_scan")
  def test_closed_over_array(self, wrap):
    flag = jnp.asarray(False)
    text = tu.lower(WRAPS[wrap](lambda x: lax.cond(flag, IF_TRUE, IF_FALSE, x)),
                    X, platforms=("cpu",))
    self.assertEqual(0, tu.count_ops(text, "stablehlo.case"))
    self.assertNotIn("2.25", text)

  @parameterized.parameters(-5, -1, 0, 1, 2, 3, np.int8(-7), np.uint32(9))
  def test_switch_clamps(self, index):
    taken = THREE[int(np.clip(int(index), 0, 2))]
    f = lambda x: lax.switch(index, THREE, x)
    self.assertSameModule(f, taken, X)
    self.assertSameModule(jax.grad(lambda x: f(x).sum()),
                          jax.grad(lambda x: taken(x).sum()), X)
    self.assertAllClose(jax.jit(f)(X), taken(X))

  def test_kernel_that_is_not_taken(self):
    x = np.ones((8, 128), np.float32)
    f = lambda x: x + lax.cond(False, kernel(False), kernel(True), x)
    self.assertAllClose(jax.jit(f)(x), x + 2)
    self.assertAllClose(jax.jit(jax.vmap(f))(x[None]), x[None] + 2)
    # Both branches are lowered if it is not known.
    with self.assertRaisesRegex(ValueError, "interpret mode"):
      jax.jit(lambda x: lax.cond(x[0, 0] > 3, kernel(False), kernel(True), x)
              )(x)

  def test_ordered_effect_that_is_not_taken(self):
    def speak(x):
      jax.debug.print("{}", x, ordered=True)
      return x * 2.25
    f = lambda x: lax.cond(False, speak, lambda x: x * 1.25, x)
    self.assertSameModule(f, lambda x: x * 1.25, X)
    g = lambda x: lax.cond(True, speak, lambda x: x * 1.25, x)
    self.assertIn("callback", tu.lower(g, X, platforms=("cpu",)))

  def test_branches_with_constants(self):
    table = np.arange(4, dtype=np.float32)
    f = lambda x: lax.cond(True, lambda x: x + table, lambda x: x - table, x)
    self.assertSameModule(f, lambda x: x + table, X)


# How a flag gets to the conditional.
def by_argument(x, flag):
  return jax.jit(lambda x, flag: lax.cond(flag, IF_TRUE, IF_FALSE, x))(x, flag)


def by_scan_constant(x, flag):
  return lax.scan(lambda c, _: (lax.cond(flag, IF_TRUE, IF_FALSE, c), None), x,
                  None, length=3)[0]


def by_scan_carry(x, flag):
  def body(carry, _):
    c, flag = carry
    return (lax.cond(flag, IF_TRUE, IF_FALSE, c), flag), None
  (c, flag), _ = lax.scan(body, (x, flag), None, length=3)
  return lax.cond(flag, IF_TRUE, IF_FALSE, c)


def by_scan_input(x, flag):
  return lax.scan(lambda c, flag: (lax.cond(flag, IF_TRUE, IF_FALSE, c), None),
                  x, jnp.broadcast_to(flag, (3,)))[0]


def by_while_constant(x, flag):
  def body(carry):
    i, x = carry
    return i + 1, lax.cond(flag, IF_TRUE, IF_FALSE, x)
  return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def by_while_condition(x, flag):
  def cond(carry):
    i, x = carry
    return (i < 3) & (lax.cond(flag, IF_TRUE, IF_FALSE, x)[0] < 9)
  return lax.while_loop(cond, lambda carry: (carry[0] + 1, carry[1] + 1),
                        (0, x))[1]


def by_remat(x, flag):
  return jax.checkpoint(lambda x: lax.cond(flag, IF_TRUE, IF_FALSE, x))(x)


def by_remat_of_scan(x, flag):
  return jax.checkpoint(lambda x: by_scan_constant(x, flag))(x)


def by_custom_vjp(x, flag):
  @jax.custom_vjp
  def f(x, flag):
    return lax.cond(flag, IF_TRUE, IF_FALSE, x)
  f.defvjp(lambda x, flag: (f(x, flag), flag),
           lambda flag, ct: (lax.cond(flag, IF_TRUE, IF_FALSE, ct), None))
  return f(x, flag)


def by_conditional(x, flag):
  return lax.cond(x[1] > 0,
                  lambda x, flag: lax.cond(flag, IF_TRUE, IF_FALSE, x),
                  lambda x, flag: lax.cond(flag, IF_TRUE, IF_FALSE, x) + 1,
                  x, flag)


def by_output(x, flag):
  flag, _ = jax.jit(lambda flag: (jnp.logical_not(flag), 1))(flag)
  return lax.cond(flag, IF_FALSE, IF_TRUE, x)


def by_output_of_conditional(x, flag):
  flag = lax.cond(flag, lambda: 3, lambda: 7)
  return lax.cond(flag == 3, IF_TRUE, IF_FALSE, x)


def by_operations(x, flag):
  flag = jnp.where(flag, jnp.int8(5), jnp.int8(4)) >= 5
  return lax.cond(flag & True | False, IF_TRUE, IF_FALSE, x)


def by_switch(x, flag):
  return lax.switch(jnp.where(flag, 9, -9), [IF_FALSE, IF_TRUE], x)


WAYS = (by_argument, by_scan_constant, by_scan_carry, by_scan_input,
        by_while_constant, by_while_condition, by_remat, by_remat_of_scan,
        by_custom_vjp, by_conditional, by_output, by_output_of_conditional,
        by_operations, by_switch)


class WaysTest(tu.JcpTestCase):
  """The flag comes from elsewhere in the program."""

  @parameterized.parameters(*WAYS)
  def test_python_flag(self, way):
    text = tu.lower(lambda x: way(x, True), X, platforms=("cpu",))
    self.assertNotIn("1.25", text)
    self.assertIn("2.25", text)

  @parameterized.parameters(*WAYS)
  def test_platform_flag(self, way):
    f = lambda x: way(x, flag_of_platform())
    for platform in ("cpu", "tpu"):
      with self.subTest(platform):
        text = tu.lower(f, X, platforms=(platform,))
        self.assertNotIn("1.25" if platform == "tpu" else "2.25", text)
        self.assertIn("2.25" if platform == "tpu" else "1.25", text)

  @parameterized.parameters(*WAYS)
  def test_export_for_several_platforms(self, way):
    f = lambda x: way(x, flag_of_platform())
    self.assertRunsAs(f, {p: functools.partial(way, flag=p == "tpu")
                          for p in PLATFORMS}, X, rtol=1e-5)

  @parameterized.parameters(
      *(w for w in WAYS if w not in (by_while_constant, by_while_condition)))
  def test_gradient(self, way):
    f = jax.grad(lambda x: way(x, flag_of_platform()).sum())
    for platform in ("cpu", "tpu"):
      with self.subTest(platform):
        text = tu.lower(f, X, platforms=(platform,))
        self.assertNotIn("1.25" if platform == "tpu" else "2.25", text)
        self.assertIn("2.25" if platform == "tpu" else "1.25", text)
    self.assertAllClose(jax.jit(f)(X), jax.grad(
        lambda x: way(x, False).sum())(X))

  # JAX passes on all operands of a conditional as batched if its index is.
  @parameterized.parameters(*(w for w in WAYS if w is not by_conditional))
  def test_vmap(self, way):
    text = tu.lower(jax.vmap(lambda x: way(x, flag_of_platform())), X[None],
                    platforms=("cuda",))
    self.assertNotIn("2.25", text)


class PlatformFlagTest(tu.JcpTestCase):
  """The index differs by platform."""

  def test_only_what_a_platform_takes_is_lowered_for_it(self):
    def f(x):
      i = lax.platform_dependent(cpu=lambda: 0, cuda=lambda: 1, tpu=lambda: 2)
      return lax.switch(i, [tu.only_on(p) for p in PLATFORMS], x)
    for g in (f, jax.jit(f), jax.vmap(f), jax.grad(lambda x: f(x).sum()),
              lambda x: lax.scan(lambda c, _: (f(c), None), x, None,
                                 length=2)[0]):
      for platform in PLATFORMS:
        self.assertNotIn("case", tu.lower(g, X, platforms=(platform,)))
      text = tu.lower(g, X, platforms=PLATFORMS)
      self.assertEqual(1, tu.count_ops(text, "stablehlo.case"))
    self.assertRunsAs(f, dict.fromkeys(PLATFORMS, lambda x: x + 1), X)

  def test_flag_in_helper(self):
    @jax.jit
    def helper(x, flag):
      return lax.cond(flag, tu.only_on("tpu"), lambda x: x * 3, x)
    f = lambda x: helper(helper(x, flag_of_platform()), flag_of_platform())
    self.assertRunsAs(f, dict(cpu=lambda x: x * 9, cuda=lambda x: x * 9,
                              tpu=lambda x: x + 2), X)

  def test_same_on_all(self):
    def f(x):
      flag = lax.platform_dependent(rocm=lambda: True, default=lambda: False)
      return lax.cond(flag, tu.only_on("rocm"), lambda x: x * 3, x)
    text = tu.lower(f, X, platforms=PLATFORMS)
    self.assertEqual(0, tu.count_ops(text, "stablehlo.case"))

  def test_flag_that_is_data_on_some(self):
    def f(x):
      flag = lax.platform_dependent(
          x[0] > 0, tpu=lambda _: True, default=lambda flag: flag)
      return lax.cond(flag, IF_TRUE, IF_FALSE, x)
    self.assertNotIn("1.25", tu.lower(f, X, platforms=("tpu",)))
    self.assertIn("1.25", tu.lower(f, X, platforms=("cpu",)))
    for x in (X, -X):
      self.assertRunsAs(f, dict(
          cpu=IF_TRUE if x[0] > 0 else IF_FALSE, tpu=IF_TRUE), x)

  @parameterized.parameters("plain", "jit", "grad", "grad_of_scan")
  def test_known_on_some_of_several_platforms(self, wrap):
    """There only the branch taken is lowered; elsewhere all are."""
    def f(x):
      index = lax.platform_dependent(
          x, cpu=lambda _: 7, cuda=lambda _: 0,
          default=lambda x: (jnp.sum(x) > 0).astype(int))
      return lax.switch(index, [
          lambda x: lax.platform_dependent(
              x, cuda=tu.only_on("cuda"), tpu=THREE[0]),
          lambda x: lax.platform_dependent(x, tpu=THREE[1]),
          lambda x: lax.platform_dependent(
              x, cpu=tu.only_on("cpu"), tpu=THREE[2])], x)
    add_one = WRAPS[wrap](lambda x: x + 1)
    for x in (X, -X):
      on_tpu = WRAPS[wrap](
          lambda x: lax.cond(jnp.sum(x) > 0, THREE[1], THREE[0], x))
      for platforms in (("cpu", "tpu"), ("cpu", "cuda", "tpu"),
                        ("tpu", "cuda", "cpu")):
        self.assertRunsAs(
            WRAPS[wrap](f),
            {p: on_tpu if p == "tpu" else add_one for p in platforms}, x,
            rtol=1e-5)

  def test_conjunction(self):
    """A flag that is false decides, whatever it is combined with."""
    def f(x):
      return lax.cond(flag_of_platform() & (x[0] > 0), tu.only_on("tpu"),
                      lambda x: x * 3, x)
    def g(x):
      return lax.cond(jnp.logical_not(flag_of_platform()) | (x[0] > 0),
                      lambda x: x * 3, tu.only_on("tpu"), x)
    for h in (f, g):
      self.assertSameModule(h, lambda x: x * 3, X)
      self.assertIn("case", tu.lower(h, X, platforms=("tpu",)))

  @tu.requires("compute_on")
  def test_compute_on_host(self):
    """On the host it is the host's flag, wherever it is made."""
    def host(x, flag):
      return (lax.cond(flag_of_platform(), IF_TRUE, IF_FALSE, x) +
              lax.cond(flag, lambda x: x * 7.25, lambda x: x * 8.25, x))
    f = lambda x: tu.on_host(host)(x, flag_of_platform())
    for platforms in (("tpu",), ("cpu",), ("cpu", "tpu")):
      text = tu.lower(f, X, platforms=platforms)
      self.assertIn("1.25", text)
      self.assertNotIn(" 2.25", text)
      if "tpu" in platforms:
        self.assertIn("7.25", text)
      if "cpu" in platforms:
        self.assertIn("8.25", text)
      false = jnp.asarray(False)
      g = lambda x: tu.on_host(lambda x, flag: lax.cond(
          flag, tu.only_on("tpu"), IF_FALSE, x))(x, false)
      self.assertIn("1.25", tu.lower(g, X, platforms=platforms))

  def test_index_of_the_platform_itself(self):
    """A flag of an outer branch is known in what it calls."""
    def f(x):
      flag = flag_of_platform()
      return lax.platform_dependent(
          x, cpu=lambda x: lax.cond(flag, tu.only_on("tpu"), THREE[0], x),
          default=lambda x: lax.cond(flag, THREE[1], THREE[2], x))
    self.assertRunsAs(f, dict(cpu=THREE[0], cuda=THREE[2], tpu=THREE[1]), X)


class UntouchedTest(tu.JcpTestCase):

  def test_unknown_index(self):
    flags = np.array([True, False])
    programs = [
        lambda x: lax.cond(x[0] > 0, IF_TRUE, IF_FALSE, x),
        lambda x: lax.switch(x[0].astype(np.int32), THREE, x),
        lambda x: lax.scan(lambda c, f: (lax.cond(f, IF_TRUE, IF_FALSE, c), f),
                           x, flags),
        lambda x: lax.scan(lambda c, _: (
            (lax.cond(c[1], IF_TRUE, IF_FALSE, c[0]), ~c[1]), None),
            (x, True), None, length=2)[0][0],
        lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (
            lax.cond(c[1] == 1, IF_TRUE, IF_FALSE, c[0]), c[1] + 1), (x, 0)),
        lambda x: lax.fori_loop(0, 3, lambda i, c: lax.cond(
            i == 1, IF_TRUE, IF_FALSE, c), x),
        lambda x: lax.cond(lax.cond(x[0] > 0, lambda: True, lambda: False),
                           IF_TRUE, IF_FALSE, x),
        lambda x: jax.jit(lambda x, f, n: (lax.cond(f, IF_TRUE, IF_FALSE, x), n)
                          )(x, x[0] > 0, 3),
    ]
    for i, f in enumerate(programs):
      with self.subTest(str(i)):
        jaxpr = jax.make_jaxpr(f)(X)
        self.assertIs(jaxpr, resolution.resolve(
            jaxpr, ("cpu",), resolution.Scope.PROGRAM))
        self.assertSameModuleAsWithout(f, X, platforms=("cpu",))

  def test_runs_as_without(self):
    """Loops that change a flag that is known when they begin."""
    def by_carry(x):
      def body(carry, _):
        x, flag = carry
        return (lax.cond(flag, IF_TRUE, IF_FALSE, x), jnp.logical_not(flag)), (
            flag)
      return lax.scan(body, (x, True), None, length=3)
    def by_swapped_carry(x):
      def body(carry, _):
        x, a, b = carry
        return (lax.cond(a, IF_TRUE, IF_FALSE, x), b, a), a
      return lax.scan(body, (x, True, False), None, length=3)
    def by_empty_loop(x):
      (_, flag), _ = lax.scan(lambda c, _: ((c[0], False), None), (x, True),
                              None, length=0)
      return lax.cond(flag, IF_TRUE, IF_FALSE, x)
    for f in (by_carry, by_swapped_carry, by_empty_loop):
      with jax_cond_patch.deactivated():
        expected = jax.jit(lambda x: f(x))(X)
      self.assertAllClose(jax.jit(lambda x: f(x))(X), expected)

  @parameterized.parameters(*WRAPS)
  def test_jaxpr(self, wrap):
    """It is JAX's, unless that can't be lowered or transformed."""
    def f(x):
      return lax.cond(False, lambda x: jax.jit(IF_TRUE)(x),
                      lambda x: lax.switch(7, THREE, x), x)
    jaxprs = []
    for context in (jax_cond_patch.activated, jax_cond_patch.deactivated):
      with context():
        jaxprs.append(re.sub("0x[0-9a-f]+", "", str(
            jax.make_jaxpr(WRAPS[wrap](f))(X))))
    self.assertMultiLineEqual(*jaxprs)

  def test_branches_are_traced_and_checked(self):
    f = lambda x: lax.cond(False, lambda x: x[0], lambda x: x, x)
    with jax_cond_patch.deactivated():
      with self.assertRaises(TypeError) as direct:
        jax.jit(f)(X)
    with self.assertRaisesRegex(TypeError, re.escape(str(direct.exception))):
      jax.jit(f)(X)
    with self.assertRaisesRegex(ZeroDivisionError, "of the branch"):
      def fail(x):
        raise ZeroDivisionError("of the branch")
      jax.jit(lambda x: lax.cond(False, fail, lambda x: x, x))(X)

  def test_taken_branch_that_cannot_be_lowered(self):
    with self.assertRaisesRegex(ValueError, "interpret mode"):
      jax.jit(lambda x: lax.cond(True, kernel(False), kernel(True), x))(
          np.ones((8, 128), np.float32))

  def test_eager(self):
    f = lambda flag, x: lax.cond(flag, IF_TRUE, IF_FALSE, x)
    for flag in (True, np.bool_(False), jnp.asarray(True)):
      expected = (IF_TRUE if flag else IF_FALSE)(X)
      self.assertAllClose(f(flag, X), expected)
      with jax.disable_jit():
        self.assertAllClose(f(flag, X), expected)

  def test_eager_with_branch_that_cannot_be_lowered(self):
    x = np.ones((8, 128), np.float32)
    f = lambda flag, x: lax.cond(flag, kernel(False), lambda x: x * 3, x)
    self.assertAllClose(f(False, x), x * 3)
    self.assertAllClose(jax.vmap(lambda x: f(False, x))(x[None]), x[None] * 3)
    with self.assertRaisesRegex(ValueError, "interpret mode"):
      f(True, x)

  def test_eager_error_while_running_is_raised_once(self):
    calls = []
    def fail(x):
      calls.append(x)
      raise ZeroDivisionError("at run time")
    def f(x):
      return jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), x)
    with self.assertRaisesRegex(Exception, "at run time"):
      jax.block_until_ready(lax.cond(True, f, lambda x: x, np.float32(1)))
    self.assertLen(calls, 1)


class DifferentiationTest(tu.JcpTestCase):
  """Only the branch taken needs a derivative."""

  @parameterized.named_parameters(
      ("bool", lambda f, g, x: lax.cond(False, f, g, x)),
      ("numpy", lambda f, g, x: lax.cond(np.bool_(False), f, g, x)),
      ("array", lambda f, g, x: lax.cond(jnp.asarray(0) > 0, f, g, x)),
      ("switch", lambda f, g, x: lax.switch(1, [f, g], x)),
      ("clamped", lambda f, g, x: lax.switch(9, [f, g], x)))
  def test_gradient(self, choose):
    def cube(x_ref, o_ref):
      o_ref[...] = x_ref[...] ** 3
    def kernel(x):
      return pl.pallas_call(cube, out_shape=jax.ShapeDtypeStruct(
          x.shape, x.dtype))(x)
    direct = lambda x: (x ** 3).sum()
    f = lambda x: choose(kernel, lambda x: x ** 3, x).sum()
    scanned = lambda x: lax.scan(
        lambda c, _: (choose(kernel, lambda x: x ** 3, c), None), x, None,
        length=2)[0].sum()
    for g in (jax.grad(f), jax.grad(jax.jit(f)), jax.grad(jax.checkpoint(f)),
              jax.vmap(jax.grad(f)), lambda x: jax.linearize(f, x)[1](x),
              jax.grad(scanned)):
      jax.jit(g)(X)
    self.assertAllClose(jax.jit(jax.grad(f))(X), jax.grad(direct)(X))
    self.assertAllClose(jax.grad(jax.jit(f))(X), jax.grad(direct)(X))
    self.assertAllClose(jax.jit(jax.grad(scanned))(X), 9 * X ** 8, rtol=1e-5)

  def test_vmap_without_a_rule(self):
    no_rule = tu.doubling_primitive("no_rule").bind
    f = jax.vmap(lambda x: lax.switch(-3, [lambda x: x * 3, no_rule], x))
    self.assertSameModule(f, lambda x: x * 3, X)
    with self.assertRaisesRegex(NotImplementedError, "Batching rule"):
      jax.jit(jax.vmap(lambda x: lax.cond(x > 0, no_rule, jnp.sin, x)))(X)
    with self.assertRaisesRegex(NotImplementedError, "Batching rule"):
      jax.jit(jax.vmap(lambda x: lax.cond(True, no_rule, jnp.sin, x)))(X)

  def test_unknown_index(self):
    for f in (lambda x: lax.cond(x[0] > 0, IF_TRUE, IF_FALSE, x).sum(),
              lambda x: lax.switch(x[0].astype(int), THREE, x).sum()):
      jaxpr = str(jax.make_jaxpr(jax.grad(f))(X))
      with jax_cond_patch.deactivated():
        self.assertEqual(jaxpr, str(jax.make_jaxpr(jax.grad(f))(X)))


class SharingTest(tu.JcpTestCase):

  def test_helpers(self):
    @jax.jit
    def helper(x, flag, n):
      return lax.cond(flag, IF_TRUE, IF_FALSE, x) * n
    def count(*calls):
      def f(x):
        for flag, n in calls:
          x = helper(x, flag, n)
        return x
      return tu.count_ops(tu.lower(f, X, platforms=("cpu",)), "func.func")
    self.assertEqual(2, count((True, 2), (True, 2)))
    self.assertEqual(3, count((True, 2), (False, 2)))
    # What no index depends on makes no difference.
    self.assertEqual(2, count((True, 2), (True, 3)))

  def test_many_operations_on_a_flag(self):
    def f(x):
      flag = jnp.asarray(True)
      for _ in range(500):
        flag = jnp.logical_not(jnp.logical_not(flag & (x[0] > -9)))
      return lax.cond(flag, IF_TRUE, IF_FALSE, x)
    self.assertAllClose(jax.jit(f)(X), IF_TRUE(X))

  @tu.requires("serialization")
  def test_exported(self):
    f = lambda x: lax.cond(flag_of_platform(), tu.only_on("tpu"), IF_FALSE, x)
    exported = tu.export(jax.jit(f), platforms=("cpu", "tpu"))(X)
    reloaded = tu.reloaded(exported, vjp_order=1)
    self.assertAllClose(reloaded.call(X), IF_FALSE(X))


if __name__ == "__main__":
  absltest.main()
