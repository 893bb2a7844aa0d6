"""Tests that platforms are staged out, and carried by transformations."""
import dataclasses
import inspect
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4


def choose(x):
  return lax.platform_dependent(
      x, tpu=lambda x: jnp.cos(x) * 3, default=lambda x: jnp.sin(x) * 2)


CHOOSE_PLATFORMS = (("tpu",), None)


def transformations(choose):
  """A function under each transformation, by its name."""
  return dict(
      jit=jax.jit(choose),
      nested_jit=jax.jit(jax.jit(jax.jit(choose))),
      scan=lambda x: lax.scan(
          lambda c, _: (choose(c), c), x, None, length=2)[0],
      while_=lambda x: lax.while_loop(
          lambda c: jnp.sum(c) < 9, lambda c: choose(c) + 1, x),
      fori=lambda x: lax.fori_loop(0, 3, lambda _, c: choose(c), x),
      cond=lambda x: lax.cond(x[0] > 0, choose, lambda x: x, x),
      vmap=jax.vmap(choose),
      vmap_jit=jax.vmap(jax.jit(choose)),
      jvp=lambda x: jax.jvp(choose, (x,), (x,))[1],
      jvp_jit=lambda x: jax.jvp(jax.jit(choose), (x,), (x,))[1],
      grad=jax.grad(lambda x: choose(x).sum()),
      grad_jit=jax.grad(lambda x: jax.jit(choose)(x).sum()),
      grad_scan=jax.grad(lambda x: lax.scan(
          lambda c, _: (choose(c), None), x, None, length=2)[0].sum()),
      hessian=jax.hessian(lambda x: choose(x).sum()),
      linearize=lambda x: jax.linearize(choose, x)[1](x),
      linearize_jit=lambda x: jax.linearize(jax.jit(choose), x)[1](x),
      vmap_grad=jax.vmap(jax.grad(choose)),
      grad_vmap=jax.grad(lambda x: jax.vmap(choose)(x).sum()),
      remat=jax.grad(lambda x: jax.checkpoint(choose)(x).sum()),
      remat_scan=jax.grad(lambda x: lax.scan(jax.checkpoint(
          lambda c, _: (choose(c), None)), x, None, length=2)[0].sum()),
      remat_jit=jax.grad(lambda x: jax.checkpoint(jax.jit(choose))(x).sum()),
  )


TRANSFORMED = transformations(choose)
TRANSFORMED_DIRECTLY = transformations(lambda x: jnp.sin(x) * 2)
TRANSFORMED_DIRECTLY_TPU = transformations(lambda x: jnp.cos(x) * 3)


class RulesTest(tu.JcpTestCase):

  def test_staged_conditional(self):
    jaxpr = jax.make_jaxpr(choose)(X)
    index, cond = jaxpr.eqns
    self.assertEqual(index.primitive.name, "platform_index")
    self.assertIs(cond.primitive, internals.cond_p)
    self.assertEqual(cond.params[tu.PLATFORMS], CHOOSE_PLATFORMS)
    self.assertIs(cond.invars[0], index.outvars[0])
    self.assertIn(f"{tu.PLATFORMS}=(('tpu',), None)", str(jaxpr))

  @parameterized.parameters(*TRANSFORMED)
  def test_carried_by(self, name):
    jaxpr = jax.make_jaxpr(TRANSFORMED[name])(X)
    conds = [eqn for eqn in tu.find_eqns(jaxpr, "cond")
             if not (name == "cond" and len(eqn.params["branches"]) == 2
                     and eqn.params.get(tu.PLATFORMS) is None)]
    self.assertNotEmpty(conds)
    for eqn in conds:
      self.assertEqual(eqn.params.get(tu.PLATFORMS), CHOOSE_PLATFORMS)
    self.assertEmpty(tu.find_eqns(jaxpr, "clamp"))
    self.assertEmpty(tu.find_eqns(jaxpr, "select_n"))

  @parameterized.parameters(*TRANSFORMED)
  def test_value_under(self, name):
    self.assertAllClose(jax.jit(TRANSFORMED[name])(X),
                        TRANSFORMED_DIRECTLY[name](X), rtol=1e-5)

  @parameterized.parameters(*TRANSFORMED)
  def test_module_under(self, name):
    """The module holds nothing but what the owner called directly gives."""
    for platform, direct in (("cpu", TRANSFORMED_DIRECTLY[name]),
                             ("tpu", TRANSFORMED_DIRECTLY_TPU[name])):
      text = tu.lower(TRANSFORMED[name], X, platforms=(platform,))
      expected = tu.lower(direct, X, platforms=(platform,))
      other = "cosine" if platform == "cpu" else "sine"
      for op in ("stablehlo.case", "stablehlo.constant", "stablehlo.multiply",
                 "stablehlo.sine", "stablehlo.cosine", "stablehlo.while",
                 "stablehlo.dynamic_update_slice", "stablehlo.broadcast_in_dim",
                 "func.func", "call"):
        self.assertEqual(tu.count_ops(text, op), tu.count_ops(expected, op),
                         msg=f"{op} for {platform}, not {other}\n{text}")

  @parameterized.parameters(*TRANSFORMED)
  def test_runs_in_a_module_for_several_platforms(self, name):
    self.assertRunsAs(
        TRANSFORMED[name], dict(cpu=TRANSFORMED_DIRECTLY[name],
                                cuda=TRANSFORMED_DIRECTLY[name],
                                tpu=TRANSFORMED_DIRECTLY_TPU[name]),
        X, rtol=1e-5)

  def test_mapped_index(self):
    """An index that became an operand of a batch is made again."""
    def model(x):
      return jax.jit(choose)(x)

    def outer(x):
      _, lin = jax.linearize(model, x)
      return lax.cond(x[0] > 0.5, lin, lambda v: v, x)

    xs = np.stack([X, -X])
    jaxpr = jax.make_jaxpr(jax.vmap(outer))(xs)
    self.assertNotEmpty(tu.find_eqns(jaxpr, "cond"))
    text = tu.lower(jax.vmap(outer), xs, platforms=("cpu",))
    self.assertNotIn("stablehlo.case", text)
    expected = np.where(xs[:, :1] > 0.5, 2 * np.cos(xs) * xs, xs)
    self.assertAllClose(jax.jit(jax.vmap(outer))(xs), expected, rtol=1e-5)

  def test_batched_index_operand(self):
    jaxpr = jax.make_jaxpr(choose)(X)
    cond = jaxpr.eqns[1]
    mapped = jax.vmap(lambda i, x: internals.cond_p.bind(i, x, **cond.params),
                      in_axes=(0, None))
    made = jax.make_jaxpr(mapped)(np.zeros(3, np.int32), X)
    self.assertLen(tu.find_eqns(made, "cond"), 1)
    self.assertLen(tu.find_eqns(made, "platform_index"), 1)
    self.assertEmpty(tu.find_eqns(made, "select_n"))

  def test_index_is_no_residual(self):
    for f in (jax.jit(choose), TRANSFORMED["scan"], jax.checkpoint(choose)):
      _, vjp = jax.vjp(f, X)
      for leaf in jax.tree_util.tree_leaves(vjp):
        self.assertNotEqual(jnp.result_type(leaf), jnp.int32)

  @parameterized.parameters("jit", "jvp", "grad", "remat")
  def test_ordinary_conditionals_inside_are_not_marked(self, name):
    def f(x):
      return lax.platform_dependent(
          x, cpu=lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
          default=lambda x: x)
    g, x = dict(
        jit=(f, X), jvp=(lambda x: jax.jvp(f, (x,), (x,)), X),
        grad=(jax.grad(lambda x: jax.jit(f)(x).sum()), X),
        remat=(jax.grad(lambda x: jax.checkpoint(f)(x).sum()), X))[name]
    conds = tu.find_eqns(jax.make_jaxpr(g)(x), "cond")
    marked = [eqn for eqn in conds if tu.PLATFORMS in eqn.params]
    self.assertNotEmpty(marked)
    self.assertLess(len(marked), len(conds))
    for eqn in marked:
      self.assertEqual(eqn.params[tu.PLATFORMS], (("cpu",), None))

  @parameterized.parameters("jvp", "grad", "vmap", "remat", "scan", "jit")
  def test_ordinary_conditionals_are_as_without(self, name):
    def f(x):
      x = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
      return lax.switch(x[0].astype(int), [jnp.tan, jnp.exp, jnp.sin], x)
    g, x = dict(
        jit=(f, X), jvp=(lambda x: jax.jvp(f, (x,), (x,)), X),
        grad=(jax.grad(lambda x: f(x).sum()), X),
        vmap=(jax.vmap(f), np.stack([X, X])),
        remat=(jax.grad(lambda x: jax.checkpoint(f)(x).sum()), X),
        scan=(lambda x: lax.scan(lambda c, _: (f(c), c), x, None, length=2), X),
    )[name]
    # New functions, since JAX caches what it has traced.
    patched = (str(jax.make_jaxpr(lambda x: g(x))(x)),
               tu.lower(lambda x: g(x), x, platforms=("cpu",)))
    with jax_cond_patch.deactivated():
      unpatched = (str(jax.make_jaxpr(lambda x: g(x))(x)),
                   tu.lower(lambda x: g(x), x, platforms=("cpu",)))
    self.assertMultiLineEqual(patched[0], unpatched[0])
    self.assertMultiLineEqual(patched[1], unpatched[1])


class PlatformDependentTest(tu.JcpTestCase):

  def test_branch_that_is_not_callable(self):
    with self.assertRaisesRegex(
        TypeError, "the 'cpu' branch must be a callable"):
      lax.platform_dependent(X, cpu=3)
    with self.assertRaisesRegex(
        TypeError, "the 'default' branch must be a callable"):
      lax.platform_dependent(X, cpu=jnp.sin, default=3)

  @tu.requires("package")
  def test_gpu(self):
    with self.assertRaisesRegex(ValueError, "Use 'cuda' or 'rocm'"):
      lax.platform_dependent(X, gpu=jnp.sin, default=jnp.cos)

  def test_same_branch_for_several_platforms(self):
    def f(x):
      return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, tpu=jnp.sin)
    cond, = tu.find_eqns(jax.make_jaxpr(f)(X), "cond")
    self.assertEqual(cond.params[tu.PLATFORMS], (("cpu", "tpu"), ("cuda",)))
    self.assertRunsAs(f, dict(cpu=np.sin, cuda=np.cos, tpu=np.sin), X)

  def test_equal_branches(self):
    @dataclasses.dataclass(frozen=True)
    class Scale:
      by: float
      def __call__(self, x):
        return x * self.by

    f = lambda x: lax.platform_dependent(x, cpu=Scale(2.), tpu=Scale(2.),
                                         cuda=Scale(3.))
    cond, = tu.find_eqns(jax.make_jaxpr(f)(X), "cond")
    self.assertEqual(cond.params[tu.PLATFORMS], (("cpu", "tpu"), ("cuda",)))

  def test_branches_that_hold_arrays(self):
    @dataclasses.dataclass
    class Scale:
      by: Any
      __hash__ = object.__hash__
      def __call__(self, x):
        return x * self.by
      def plus_one(self, x):
        return self(x) + 1

    class ComparesAsArray:
      def __init__(self, by):
        self.by = by
      def __eq__(self, other):
        return (isinstance(other, ComparesAsArray) and
                jnp.equal(self.by, other.by))
      __hash__ = object.__hash__
      def __call__(self, x):
        return x * self.by

    for cls in (Scale, ComparesAsArray):
      a, b = cls(jnp.arange(4.)), cls(jnp.arange(4.) + 1)
      f = lambda x: lax.platform_dependent(x, cpu=a, tpu=b, default=b)
      self.assertAllClose(f(X), X * np.arange(4, dtype=np.float32))
      self.assertAllClose(jax.jit(f)(X), X * np.arange(4, dtype=np.float32))
      g = lambda x: lax.platform_dependent(x, cpu=a, tpu=a)
      cond, = tu.find_eqns(jax.make_jaxpr(g)(X), "cond")
      self.assertEqual(cond.params[tu.PLATFORMS], (("cpu", "tpu"),))
    a, b = Scale(jnp.arange(4.)), Scale(jnp.arange(4.) + 1)
    f = lambda x: lax.platform_dependent(x, cpu=a.plus_one, cuda=b.plus_one)
    self.assertAllClose(jax.jit(f)(X), X * np.arange(4, dtype=np.float32) + 1)

  def test_branch_of_another_type(self):
    """It is JAX's own error."""
    def f(x):
      return lax.platform_dependent(
          x, cpu=lambda x: x, tpu=lambda x: x.astype(jnp.int32))
    messages = []
    for context in (jax_cond_patch.activated, jax_cond_patch.deactivated):
      with context(), self.assertRaises(TypeError) as raised:
        jax.jit(lambda x: f(x))(X)
      messages.append(str(raised.exception))
    self.assertIn("output", messages[0])
    self.assertEqual(*messages)

  @parameterized.parameters(1, 2)
  def test_missing_platform(self, num_branches):
    branches = dict(cuda=jnp.sin, tpu=jnp.cos)
    branches = dict(list(branches.items())[:num_branches])
    def f(x):
      return lax.platform_dependent(x, **branches)  # here
    with open(__file__) as file:
      line = 1 + next(i for i, line in enumerate(file)
                      if line.endswith("# here\n"))
    message = (r"no branch for 'cpu'.* branches for 'cuda'"
               rf".*rules_test.py:{line}.*`cpu=`")
    for fun in (jax.jit(f), jax.jit(jax.vmap(f)), f,
                jax.jit(jax.grad(lambda x: jnp.sin(f(x)).sum())),
                lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
                lambda x: tu.lower_jitted(
                    jax.jit(f), x, platforms=("cpu",)),
                lambda x: tu.lower(f, x, platforms=("cuda", "cpu"))):
      with self.assertRaisesRegex(NotImplementedError, message):
        fun(X)
    self.assertEqual(jax.eval_shape(f, X).shape, X.shape)
    self.assertIn("stablehlo.sine", tu.lower(f, X, platforms=("cuda",)))

  def test_dead_conditional_without_branch(self):
    f = lambda x: (lax.platform_dependent(x, cuda=jnp.sin), x + 1)[1]
    self.assertAllClose(jax.jit(f)(X), X + 1)

  def test_pytrees_and_no_operands(self):
    def f(x):
      return lax.platform_dependent(
          dict(a=x, b=(x, 2)), cpu=lambda t: dict(c=t["a"] + t["b"][1], d=None),
          default=lambda t: dict(c=t["a"], d=None))
    self.assertAllClose(jax.jit(f)(X)["c"], X + 2)
    g = lambda x: lax.platform_dependent(
        cpu=lambda: x + 1, default=lambda: x)
    self.assertAllClose(jax.jit(g)(X), X + 1)
    flag = lambda: lax.platform_dependent(
        cpu=lambda: True, default=lambda: False)
    self.assertEqual(jax.jit(flag)(), True)

  def test_signature_and_doc_are_those_of_jax(self):
    signature = inspect.signature(lax.platform_dependent)
    with jax_cond_patch.deactivated():
      self.assertEqual(signature, inspect.signature(lax.platform_dependent))
    self.assertIn("platform-specific code", lax.platform_dependent.__doc__)

  def test_disable_jit(self):
    with jax.disable_jit():
      self.assertAllClose(jax.jit(choose)(X), np.sin(X) * 2)

  def test_branch_is_traced_once(self):
    traced = []
    def branch(x):
      traced.append(x)
      return x
    jax.make_jaxpr(lambda x: lax.platform_dependent(x, cuda=branch))(X)
    self.assertLen(traced, 1)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
