"""Tests of `explain`."""
import contextlib
import inspect
import io
import os
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src.state.discharge import run_state
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch import __main__ as main
from jax_cond_patch import deferral
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(4, dtype=np.float32)


def choose(x):
  return lax.platform_dependent(
      x, tpu=tu.only_on("tpu"), default=lambda x: jnp.sin(x) * 2)


def line_of(function) -> int:
  """The line of the first statement of a function."""
  return function.__code__.co_firstlineno + 1


class ExplainTest(tu.JcpTestCase):

  def assertTaken(self, conditional, **expected):
    """The branches by their names, each with the platforms that take it."""
    taken = {"_".join(b.platforms or ("default",)): b.taken_on
             for b in conditional.branches}
    self.assertEqual(taken, expected)

  def test_branches(self):
    e = jax_cond_patch.explain(choose, X, platforms=("cpu", "cuda", "tpu"))
    self.assertEqual(e.name, "choose")
    self.assertEqual(e.platforms, ("cpu", "cuda", "tpu"))
    (conditional,) = e.conditionals
    self.assertTaken(conditional, tpu=("tpu",), default=("cpu", "cuda"))
    self.assertEqual(conditional.missing, ())
    self.assertEqual(conditional.inside, ())
    self.assertEqual(conditional.location.file, __file__)
    self.assertEqual(conditional.location.line, line_of(choose))
    self.assertRegex(conditional.location.function, r"\bchoose$")
    self.assertEqual([b.equations for b in conditional.branches], [1, 2])
    self.assertFalse(any(map(e.fails_on, e.platforms)))

  def test_counts(self):
    f = lambda x: jnp.cos(choose(x))
    e = jax_cond_patch.explain(f, X)
    traced = 1 + 1 + 2 + 1  # cond, its branches, and cos
    self.assertEqual(e.equations, traced)
    alone, other, both = e.counts
    self.assertEqual((alone.platforms, alone.kept), (("cpu",), 3))
    self.assertEqual((other.platforms, other.kept), (("tpu",), 2))
    self.assertEqual((both.platforms, both.kept), (("cpu", "tpu"), traced))
    for count in e.counts:
      self.assertEqual(count.kept + count.dropped, traced)
    (alone,) = jax_cond_patch.explain(f, X, platforms="cpu").counts
    self.assertEqual(alone.kept, 3)

  def test_counts_of_what_is_resolved_while_lowering(self):
    """The solver's functions are no part of the program that is resolved."""
    def f(x):
      branches = dict(cpu=lambda x: x * 2, default=lambda x: x * 2 + 0)
      return lax.custom_linear_solve(
          lambda x: lax.platform_dependent(x, **branches), x,
          solve=lambda _, b: b / 2, symmetric=True)
    cpu, tpu, both = jax_cond_patch.explain(f, X).counts
    self.assertEqual(both.dropped, 0)
    self.assertGreater(cpu.dropped, tpu.dropped)
    self.assertGreater(tpu.dropped, 0)

  def test_references(self):
    """What is discharged before lowering needs no lowering rule."""
    def f(x):
      def body(ref):
        def branch(_):
          ref[...] = tu.only_on("tpu")(ref[...])
          return 0
        lax.platform_dependent(1., cpu=branch, default=lambda _: 0)
      return run_state(body)(x)
    e = jax_cond_patch.explain(f, X)
    (failure,) = e.conditionals[0].branches[0].failures
    self.assertEqual(failure.primitive, "only_on_tpu")
    self.assertEqual(e.counts[-1].dropped, 0)

  def test_loops_and_jit_are_entered(self):
    wraps = {
        ("scan",): lambda x: lax.scan(
            lambda c, _: (choose(c), None), x, None, length=2)[0],
        ("while",): lambda x: lax.while_loop(
            lambda x: x[0] < 1, lambda x: choose(x) + 1, x),
        ("jit g",): lambda x: g(x),
        ("cond",): lambda x: lax.cond(x[0] > 0, choose, lambda x: x, x),
        ("scan", "jit g"): lambda x: lax.scan(
            lambda c, _: (g(c), None), x, None, length=2)[0]}
    @jax.jit
    def g(x):
      return choose(x)
    for inside, f in wraps.items():
      with self.subTest(inside):
        (conditional,) = jax_cond_patch.explain(f, X).conditionals
        self.assertEqual(conditional.inside, inside)
        self.assertTaken(conditional, tpu=("tpu",), default=("cpu",))

  def test_nested(self):
    inner = lambda x: lax.platform_dependent(
        x, cpu=lambda x: x + 1, cuda=lambda x: x + 2)
    f = lambda x: lax.platform_dependent(
        x, tpu=inner, default=lambda x: jax.jit(inner)(x) * 3)
    e = jax_cond_patch.explain(f, X, platforms=("cpu", "cuda", "tpu"))
    (outer,) = e.conditionals
    self.assertTaken(outer, tpu=("tpu",), default=("cpu", "cuda"))
    (on_tpu,), (on_others,) = [b.conditionals for b in outer.branches]
    self.assertEqual(on_tpu.missing, ("tpu",))
    self.assertTaken(on_tpu, cpu=(), cuda=())
    self.assertEqual(on_others.missing, ())
    self.assertTaken(on_others, cpu=("cpu",), cuda=("cuda",))
    self.assertEqual([e.fails_on(p) for p in e.platforms],
                     [False, False, True])
    for branch in outer.branches:
      self.assertEmpty(branch.failures)

  def test_missing(self):
    f = lambda x: lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos)
    e = jax_cond_patch.explain(f, X, platforms=("cpu", "rocm", "tpu"))
    (conditional,) = e.conditionals
    self.assertEqual(conditional.missing, ("cpu", "rocm"))
    self.assertTrue(e.fails_on("rocm"))
    self.assertFalse(e.fails_on("tpu"))

  def test_a_primitive_without_a_rule(self):
    @jax.jit
    def g(x):
      return tu.only_on("cuda")(x) * 2
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: jnp.sin(g(x)), cuda=lambda x: g(x) + 1)
    e = jax_cond_patch.explain(f, X, platforms=("cpu", "cuda"))
    on_cpu, on_cuda = e.conditionals[0].branches
    self.assertEmpty(on_cuda.failures)
    (failure,) = on_cpu.failures
    self.assertEqual(failure.primitive, "only_on_cuda")
    self.assertEqual(failure.platforms, ("cpu",))
    self.assertRegex(failure.location.function, r"\bg$")
    self.assertIn("no lowering rule of only_on_cuda for cpu", failure.error)

  def test_what_jax_says(self):
    """The error is the one that the branch called directly raises."""
    def kernel(x):
      return pl.pallas_call(
          lambda x_ref, o_ref: None,
          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    f = lambda x: lax.platform_dependent(x, cpu=kernel, default=kernel)
    with self.assertRaises(Exception) as direct:
      internals.lower_for(kernel, [X], "cpu")
    e = jax_cond_patch.explain(f, X, platforms=("cpu",))
    (failure,) = e.conditionals[0].branches[0].failures
    self.assertEqual(failure.primitive, "pallas_call")
    self.assertRegex(failure.location.function, r"\bkernel$")
    error = direct.exception
    self.assertEqual(failure.error,
                     f"{type(error).__name__}: {error}".splitlines()[0])

  def test_outside_of_conditionals(self):
    f = lambda x: tu.only_on("cpu")(choose(x))
    e = jax_cond_patch.explain(f, X)
    (failure,) = e.failures
    self.assertEqual(failure.primitive, "only_on_cpu")
    self.assertEqual(failure.platforms, ("tpu",))
    self.assertEqual([e.fails_on(p) for p in e.platforms], [False, True])
    self.assertIn("! tpu: only_on_cpu at ", str(e))

  def test_callback(self):
    on_host = lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    f = lambda x: lax.platform_dependent(x, cpu=on_host, default=jnp.sin)
    (conditional,) = jax_cond_patch.explain(f, X).conditionals
    self.assertEmpty(conditional.branches[0].failures)

  def test_deferred_errors(self):
    def deferred(x):
      return deferral.deferred_error_p.bind(
          deferred=deferral.DeferredError(TypeError, "no such rule\nmore"),
          effectful=False, out_avals=(x.aval,))[0]
    f = lambda x: lax.platform_dependent(
        x, tpu=lambda x: deferred(x) + 1, default=jnp.sin)
    e = jax_cond_patch.explain(f, X)
    on_tpu, default = e.conditionals[0].branches
    self.assertLen(on_tpu.deferred, 1)
    self.assertEqual(on_tpu.deferred[0].error, "TypeError: no such rule")
    self.assertRegex(on_tpu.deferred[0].location.function, r"\bdeferred$")
    self.assertEmpty(on_tpu.failures)
    self.assertEmpty(default.deferred)
    self.assertTrue(e.fails_on("tpu"))
    self.assertFalse(e.fails_on("cpu"))
    e = jax_cond_patch.explain(deferred, X)
    self.assertLen(e.deferred, 1)
    self.assertIn("deferred at", str(e))

  def test_deferred_by_a_transformation(self):
    """As a kernel without a batching rule, under vmap."""
    primitive = core.Primitive("without_rules")
    primitive.def_abstract_eval(lambda x: x)
    f = jax.vmap(lambda x: lax.platform_dependent(
        x, tpu=primitive.bind, default=jnp.sin))
    e = jax_cond_patch.explain(f, X)
    on_tpu, default = e.conditionals[0].branches
    (deferred,) = on_tpu.deferred
    self.assertIn("Batching rule for 'without_rules' not implemented",
                  deferred.error)
    self.assertEqual(deferred.location.file, __file__)
    self.assertEmpty(default.deferred)
    self.assertEqual([e.fails_on(p) for p in e.platforms], [False, True])

  def test_equal_ones_are_told_once(self):
    def f(x):
      for _ in range(30):
        x = choose(x)
      return x
    (conditional,) = jax_cond_patch.explain(f, X).conditionals
    self.assertEqual(conditional.times, 30)
    self.assertIn("30 times", str(jax_cond_patch.explain(f, X)))

  def test_gradient(self):
    f = lambda x: lax.platform_dependent(
        x, tpu=jnp.sin, default=lambda x: jnp.cos(x) * x)
    e = jax_cond_patch.explain(jax.grad(lambda x: f(x).sum()), X)
    self.assertGreaterEqual(len(e.conditionals), 2)
    for conditional in e.conditionals:
      self.assertTaken(conditional, tpu=("tpu",), default=("cpu",))

  def test_axes_of_a_map_around_it(self):
    """A branch that uses one is not taken for a failure."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    try:
      shard_map = jax.shard_map
    except AttributeError:
      from jax.experimental.shard_map import shard_map
    # Whether it checks what is replicated does not matter here, and some
    # releases have no rule for that.
    check = [name for name in inspect.signature(shard_map).parameters
             if name.startswith("check_")]
    fails = lambda x: lax.platform_dependent(x, cpu=tu.only_on("tpu"))
    def f(x):
      return shard_map(
          lambda x: lax.platform_dependent(
              x, tpu=lambda x: x + lax.psum(x, "i"),
              default=lambda x: x + 2 * lax.psum(x, "i")),
          mesh=mesh, in_specs=spec, out_specs=spec,
          **dict.fromkeys(check, False))(fails(x))
    e = jax_cond_patch.explain(f, X)
    failing, conditional = e.conditionals
    self.assertLen(failing.branches[0].failures, 1)
    self.assertEqual(conditional.inside[-1], "shard_map")
    for branch in conditional.branches:
      self.assertEmpty(branch.failures)

  def test_without_conditionals(self):
    e = jax_cond_patch.explain(jnp.sin, X)
    self.assertEmpty(e.conditionals)
    self.assertIn("0 platform conditionals", str(e))
    self.assertNotIn("eqns", str(e))

  def test_shapes_in_place_of_arguments(self):
    e = jax_cond_patch.explain(choose, jax.ShapeDtypeStruct((4,), np.float32))
    self.assertEqual(e, jax_cond_patch.explain(choose, X))

  def test_deactivated(self):
    expected = jax_cond_patch.explain(choose, X)
    with jax_cond_patch.deactivated():
      self.assertEqual(jax_cond_patch.explain(choose, X), expected)
      self.assertFalse(jax_cond_patch.is_active())

  @parameterized.parameters("gpu", ("cpu", "gpu"), ())
  def test_platforms(self, *platforms):
    with self.assertRaisesRegex(ValueError, "docs/pages/errors.md#"):
      jax_cond_patch.explain(choose, X, platforms=platforms)

  def test_table(self):
    e = jax_cond_patch.explain(choose, X, platforms=("cpu", "tpu"))
    title = str(e.conditionals[0].location)
    self.assertMultiLineEqual(str(e), "\n".join([
        "choose for cpu, tpu: 1 platform conditional, 4 equations traced",
        "cpu: equations kept 2, dropped 2",
        "tpu: equations kept 1, dropped 3",
        "cpu + tpu: equations kept 4, dropped 0",
        "",
        "platform conditional".ljust(len(title)) + "  eqns  cpu    tpu",
        title,
        "  tpu".ljust(len(title)) + "     1  -      taken",
        "  default".ljust(len(title)) + "     2  taken  -"]))

  def test_table_of_failures(self):
    f = lambda x: lax.platform_dependent(x, cpu=tu.only_on("tpu"))
    text = str(jax_cond_patch.explain(f, X))
    self.assertRegex(text, r"(?m)^cpu: cannot be lowered$")
    self.assertRegex(text, r"(?m)^  cpu +1  fails  -$")
    self.assertRegex(text, r"(?m) +none$")
    self.assertRegex(text, r"(?m)^    ! cpu: only_on_tpu at ")

  def test_html(self):
    def f(x):
      x = lax.platform_dependent(x, cpu=tu.only_on("tpu"), tpu=jnp.sin)
      steps = [lambda x, i=i: lax.platform_dependent(
          x, cpu=lambda x: x + i, default=jnp.cos) for i in range(12)]
      for i, step in enumerate(steps):
        x = step(jax.named_call(step, name="a<b>")(x) if i else x * 2)
        for _ in range(i):  # so that no two are equal
          x = jax.jit(lambda x: x + 1)(x)
      return x
    html = jax_cond_patch.explain(f, X)._repr_html_()
    self.assertIn("cpu fails", html)
    self.assertIn("only_on_tpu", html)
    self.assertNotIn("<lambda>", html)
    self.assertIn("&lt;lambda&gt;", html)
    for tag in ("div", "details", "summary", "span", "b"):
      self.assertEqual(len(re.findall(f"<{tag}[ >]", html)),
                       html.count(f"</{tag}>"), tag)

  def test_long_programs_are_folded(self):
    def f(x):
      for i in range(12):
        def branch(x, i=i):
          for _ in range(i):
            x = x + 1
          return x
        x = lax.platform_dependent(x, cpu=branch, default=jnp.cos)
      return x
    e = jax_cond_patch.explain(f, X)
    self.assertLen(e.conditionals, 12)
    html = e._repr_html_()
    self.assertEqual(html.count("<details"), 1)
    self.assertIn("4 more platform conditionals", html)


class CommandLineTest(tu.JcpTestCase):

  def explain(self, *argv) -> str:
    err = io.StringIO()
    with self.assertRaises(SystemExit) as exit_, contextlib.redirect_stderr(
        err):
      main.main(["explain", *argv])
    self.assertEqual(exit_.exception.code, 2)
    return err.getvalue()

  def test_table_and_drawing(self):
    file = self.create_tempfile("mine.py", """
import jax
import helper_of_mine
def f(x, n):
  n = n.astype(x.dtype)
  return jax.lax.platform_dependent(x, cpu=lambda x: x * n, default=lambda x: x)
""").full_path
    self.create_tempfile("helper_of_mine.py")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      status = main.main(
          ["explain", f"{file}:f", "bf16[2,3]", "i32[]", "--platforms=cuda"])
    self.assertEqual(status, 0)
    self.assertIn(f"{file}:6 (f)", out.getvalue())
    self.assertRegex(out.getvalue(), "(?m)^platform conditional .* eqns  cuda$")
    drawing = os.path.join(self.create_tempdir().full_path, "f.html")
    main.main(["explain", f"{file}:f", "f32[2]", "i32[]", "--html", drawing])
    with open(drawing, encoding="utf-8") as f:
      self.assertIn("tpu taken", f.read())

  def test_wrong_arguments(self):
    file = self.create_tempfile("mine.py", "x = 1\ndef f(): pass").full_path
    self.assertIn("no file 'nowhere.py'", self.explain("nowhere.py:f"))
    self.assertIn("has no function 'x'", self.explain(f"{file}:x"))
    self.assertIn("like f32[8,128]", self.explain(f"{file}:f", "f33[2]"))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
