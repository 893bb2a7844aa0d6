"""Tests that an unreachable branch cannot break a transformation."""
import collections
import functools
import gc
import inspect
import re
import weakref

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import checkify as checkify_lib
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src.interpreters import ad as ad_internals
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental import checkify
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch import deferral
from jax_cond_patch.compat import internals
import jcp_test_util as tu
from rules_test import transformations

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4


no_rules_p = tu.doubling_primitive("no_rules")


def no_rules(x):
  return no_rules_p.bind(x)


no_jvp_p = tu.doubling_primitive("no_jvp")
batching.defvectorized(no_jvp_p)


def no_jvp(x):
  return no_jvp_p.bind(x)


no_transpose_p = tu.doubling_primitive("no_transpose")
batching.defvectorized(no_transpose_p)
ad.defjvp(no_transpose_p, lambda t, x: no_transpose_p.bind(t))


def no_transpose(x):
  return no_transpose_p.bind(x)


no_batching_p = tu.doubling_primitive("no_batching")
ad.deflinear2(no_batching_p, lambda ct, x: [2 * ct])


def no_batching(x):
  # Not linear, so that no derivative is independent of it.
  return jnp.square(no_batching_p.bind(x))


# As `pallas_call` is: its jvp is one operation for the output and its tangent.
fused_p = core.Primitive("fused")
fused_p.multiple_results = True
fused_p.def_abstract_eval(lambda *xs: xs)
mlir.register_lowering(fused_p, mlir.lower_fun(
    lambda *xs: [x * 2 for x in xs], multiple_results=True))


def _fused_batching(xs, dims):
  size, = {x.shape[d] for x, d in zip(xs, dims) if d is not None}
  outs = fused_p.bind(*(
      jnp.broadcast_to(x, (size, *x.shape)) if d is None else
      jnp.moveaxis(x, d, 0) for x, d in zip(xs, dims)))
  return outs, [0] * len(outs)


batching.primitive_batchers[fused_p] = _fused_batching


def _fused_jvp(xs, ts):
  outs = fused_p.bind(*xs, *map(ad.instantiate_zeros, ts))
  return outs[:len(xs)], outs[len(xs):]


ad.primitive_jvps[fused_p] = _fused_jvp


def fused(x):
  return fused_p.bind(x)[0]


@jax.custom_vjp
def _double(x):
  return x * 2


_double.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))


def no_forward_mode(x):
  return _double(x)


def while_loop(x):
  return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2),
                        (0, x))[1]


def doubling(x):
  return x * 2


BRANCHES = dict(no_rules=no_rules, no_jvp=no_jvp, no_transpose=no_transpose,
                no_batching=no_batching, fused=fused, while_loop=while_loop,
                no_forward_mode=no_forward_mode)


# These raise alone and not in `platform_dependent`, and are right: the output
# of a kernel is told from its tangent, and what does not depend on a derivative
# that can't be computed has a derivative.
BETTER_THAN_ALONE = {
    ("fused", "jacfwd"), ("no_transpose", "hessian"),
    ("no_transpose", "vmap_hessian")}
if internals.cond_p not in getattr(ad_internals, "primitive_linearizations",
                                   ()):
  # A rule that linearizes a branch by itself refuses what JAX makes of a kernel
  # at the end.
  BETTER_THAN_ALONE |= {("fused", "linearize"), ("fused", "linearize_jit")}
if loops.while_p in pe.dce_rules:
  # What is dead in a loop is dropped, since JAX 0.12, before its derivative is
  # asked for.
  BETTER_THAN_ALONE |= {("while_loop", "hessian"),
                        ("while_loop", "vmap_hessian")}

TRANSFORMATIONS = frozenset([
    "forward-mode differentiation (jvp)",
    "linearization (of reverse-mode differentiation)",
    "transposition (of reverse-mode differentiation)",
    "partial evaluation (of reverse-mode differentiation)",
    "batching (vmap)"])


def kernel(x):
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 3
  return pl.pallas_call(
      body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def callback(x):
  return jax.pure_callback(
      lambda x: x * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def io(x):
  io_callback(lambda x: None, None, x)
  return x * 2


def scan_of_io(x):
  return lax.scan(lambda c, _: (io(c), None), x, None, length=2)[0]


def independent_io(x):
  io(lax.stop_gradient(x))
  return x * 2


def reachable(x):
  return jnp.sin(x) * 3


def elsewhere(branch):
  """A function with `branch` for another platform."""
  return lambda x: lax.platform_dependent(x, tpu=branch, default=reachable)


def sharded(f, check):
  """A function in a `shard_map`."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
  spec = jax.sharding.PartitionSpec("i")
  return tu.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check=check)


def all_transformations(f):
  return dict(
      transformations(f),
      jacfwd=jax.jacfwd(f),
      jacrev=jax.jacrev(f),
      vjp=lambda x: jax.vjp(f, x)[1](x),
      vmap_jvp=jax.vmap(lambda x: jax.jvp(f, (x,), (x,))),
      vmap_hessian=jax.vmap(jax.hessian(lambda x: f(x).sum())),
      grad_grad=jax.grad(
          lambda x: jax.grad(lambda x: f(x * x).sum())(x).sum()),
      remat_vmap=jax.grad(lambda x: jax.checkpoint(jax.vmap(f))(x).sum()),
      remat_grad=lambda x: jax.checkpoint(jax.grad(lambda x: f(x).sum()))(x),
      grad_while=lambda x: lax.while_loop(
          lambda c: c[0] < 2,
          lambda c: (c[0] + 1, jax.grad(lambda x: f(x).sum())(c[1])), (0, x)),
      grad_cond=jax.grad(
          lambda x: lax.cond(x[0] > 0, f, lambda x: x, x).sum()),
      checkify=lambda x: checkify.checkify(f)(x)[1],
  )


TRANSFORMED_DIRECTLY = all_transformations(reachable)


class DeferralTest(tu.JcpTestCase):

  @parameterized.parameters(*BRANCHES, "kernel", "callback")
  def test_works_where_unreachable(self, name):
    branch = dict(BRANCHES, kernel=kernel, callback=callback)[name]
    for t, f in all_transformations(elsewhere(branch)).items():
      with self.subTest(t):
        self.assertAllClose(jax.jit(f)(X), TRANSFORMED_DIRECTLY[t](X),
                            rtol=1e-5)

  @parameterized.parameters(*BRANCHES)
  def test_raises_where_reached(self, name):
    """It lowers if the branch alone does, and raises what that raises."""
    branch = BRANCHES[name]
    alone = all_transformations(branch)
    for t, f in all_transformations(elsewhere(branch)).items():
      with self.subTest(t):
        try:
          tu.lower(alone[t], X, platforms=("tpu",))
        except Exception as error:
          expected = error
        else:
          tu.lower(f, X, platforms=("tpu",))
          continue
        if (name, t) in BETTER_THAN_ALONE:
          self.assertRunsAs(f, dict(
              cpu=TRANSFORMED_DIRECTLY[t],
              tpu=all_transformations(doubling)[t]), X, rtol=1e-5)
          continue
        for platforms in (("tpu",), ("cpu", "tpu")):
          with self.assertRaises(Exception) as caught:
            tu.lower(f, X, platforms=platforms)
          text = str(caught.exception)
          if name == "no_forward_mode" and text == str(expected):
            # JAX itself raises this when it is lowered.
            continue
          self.assertIsDeferred(caught.exception, branch)
          if text.startswith("Transpose rule (for reverse-mode "
                             "differentiation) for 'fused' not implemented"):
            # Alone, linearization fails at its end; by an `assert` up to
            # JAX 0.4.30.
            self.assertIn("Linearization failed",
                          str(expected) or "Linearization failed")
            self.assertIsInstance(expected, (ValueError, AssertionError))
          elif text.startswith("Batching rule for 'no_rules' not implemented"):
            # It has neither rule, and alone the other one is missed first.
            self.assertIn("vmap", t)
          elif (name == "while_loop" and isinstance(expected, TypeError) and
                isinstance(caught.exception, ValueError)):
            # JAX 0.8.0 to 0.9.0 may fail on the way to its own error.
            self.assertIn("NoneType", str(expected))
            self.assertStartsWith(text, "Reverse-mode differentiation")
          else:
            self.assertIs(type(caught.exception), type(expected))
            self.assertStartsWith(text, str(expected))

  def assertStartsWith(self, text, prefix):
    self.assertEqual(text[:len(prefix)], prefix)

  def assertIsDeferred(self, error, branch):
    """The error says that it was deferred, what raised it, and where."""
    match = re.search(
        r"\n\nThis error was deferred by jax_cond_patch. The branch for 'tpu' "
        r"of platform_dependent raised it under ([^,]*), at [^ ]*"
        r"deferral_test.py:(\d+)", str(error))
    self.assertIsNotNone(match, str(error))
    self.assertIn(match[1], TRANSFORMATIONS)
    lines, start = inspect.getsourcelines(branch)
    self.assertIn(int(match[2]), range(start, start + len(lines)))

  @parameterized.parameters(
      ("grad", no_jvp, NotImplementedError, "no_jvp", "differentiation"),
      ("grad", no_transpose, NotImplementedError, "no_transpose",
       "transposition"),
      ("grad", while_loop, ValueError, "lax.while_loop", "transposition"),
      ("vmap", no_batching, NotImplementedError, "no_batching", "batching"))
  def test_message(self, name, branch, type_, message, transformation):
    f = all_transformations(elsewhere(branch))[name]
    with self.assertRaises(type_) as caught:
      tu.lower(f, X, platforms=("tpu",))
    self.assertIs(type(caught.exception), type_)
    text = str(caught.exception)
    self.assertIn(message, text)
    for word in ("deferred", "branch for 'tpu'", transformation,
                 "deferral_test.py:"):
      self.assertIn(word, text)

  def test_message_of_a_default_branch(self):
    f = lambda x: lax.platform_dependent(x, cpu=reachable, default=no_jvp)
    self.assertAllClose(jax.jit(jax.grad(lambda x: f(x).sum()))(X),
                        3 * np.cos(X), rtol=1e-5)
    with self.assertRaisesRegex(NotImplementedError, "The default branch of"):
      tu.lower(jax.grad(lambda x: f(x).sum()), X, platforms=("cuda",))

  def test_line_of_the_operation(self):
    def branch(x):
      x = x + 1
      return no_jvp_p.bind(x)  # here
    with open(__file__) as file:
      line = 1 + next(i for i, line in enumerate(file)
                      if line.endswith("# here\n"))
    with self.assertRaisesRegex(
        NotImplementedError, rf"deferral_test.py:{line}\b"):
      tu.lower(lambda x: jax.jvp(elsewhere(branch), (x,), (x,)), X,
               platforms=("tpu",))

  @parameterized.parameters(
      ("jvp", lambda f, x: jax.jvp(f, (x,), (x,))[0]),
      ("vjp", lambda f, x: jax.vjp(f, x)[0]),
      ("linearize", lambda f, x: jax.linearize(f, x)[0]),
      ("remat", lambda f, x: jax.vjp(jax.checkpoint(f), x)[0]),
      ("scan", lambda f, x: jax.vjp(lambda x: lax.scan(
          lambda c, _: (f(c), None), x, None, length=1)[0], x)[0]))
  def test_primal_works_on_its_own_platform(self, _, primal):
    for branch in (no_rules, no_jvp, no_transpose, fused, while_loop):
      for f in (elsewhere(branch), jax.jit(elsewhere(branch))):
        self.assertRunsAs(functools.partial(primal, f), dict(
            cpu=reachable, cuda=reachable, tpu=lambda x: x * 2), X)

  def test_untransformed_output_works_on_its_own_platform(self):
    def f(x, y):
      return lax.platform_dependent(
          x, y, tpu=lambda x, y: (no_rules(x), y * 2),
          default=lambda x, y: (x, y))
    second = lambda x, y: jax.vmap(f, (0, None), (0, None))(x, y)[1]
    self.assertRunsAs(second, dict(cpu=lambda x, y: y,
                                   tpu=lambda x, y: y * 2), X, X)

  def test_exports(self):
    f = jax.grad(lambda x: elsewhere(no_jvp)(x).sum())
    self.assertRunsAs(f, dict(cpu=lambda x: 3 * np.cos(x),
                              cuda=lambda x: 3 * np.cos(x)), X, rtol=1e-5)
    with self.assertRaisesRegex(NotImplementedError, "no_jvp"):
      tu.lower(f, X, platforms=("cpu", "tpu"))

  @parameterized.parameters(
      ("jvp", no_jvp), ("grad", no_transpose), ("vmap", no_batching))
  def test_raises_at_once_if_all_fail(self, name, branch):
    for f in (lambda x: lax.platform_dependent(
                  x, tpu=branch, default=lambda x: branch(x + 1)),
              lambda x: lax.platform_dependent(x, tpu=branch)):
      f = all_transformations(f)[name]
      with self.assertRaises(NotImplementedError) as caught:
        jax.make_jaxpr(f)(X)
      self.assertNotIn("deferred", str(caught.exception))

  def test_branches_that_fail_for_different_reasons(self):
    f = lambda x: lax.platform_dependent(
        x, tpu=no_jvp, cuda=no_rules, default=reachable)
    g = jax.grad(lambda x: f(x).sum())
    self.assertAllClose(jax.jit(g)(X), 3 * np.cos(X), rtol=1e-5)
    for platform, name in (("tpu", "no_jvp"), ("cuda", "no_rules")):
      with self.assertRaisesRegex(
          NotImplementedError, rf"'{name}'[^$]*branch for '{platform}'"):
        tu.lower(g, X, platforms=(platform,))

  def test_nested(self):
    def f(x):
      return lax.platform_dependent(
          x, tpu=no_rules, default=lambda x: lax.platform_dependent(
              x, cuda=no_rules, default=reachable))
    for t, g in all_transformations(f).items():
      with self.subTest(t):
        self.assertAllClose(jax.jit(g)(X), TRANSFORMED_DIRECTLY[t](X),
                            rtol=1e-5)
    for platform in ("tpu", "cuda"):
      with self.assertRaisesRegex(
          NotImplementedError, f"branch for '{platform}'"):
        tu.lower(jax.vmap(f), X, platforms=(platform,))

  def test_tracing_errors_are_not_deferred(self):
    def branch(x):
      raise RuntimeError("a bug")
    for f in all_transformations(elsewhere(branch)).values():
      with self.assertRaisesRegex(RuntimeError, "^a bug$"):
        jax.make_jaxpr(f)(X)

  def test_ordinary_conditionals_are_not_touched(self):
    f = lambda x: lax.cond(x[0] > 0, no_jvp, reachable, x)
    with self.assertRaises(NotImplementedError) as caught:
      jax.make_jaxpr(lambda x: jax.jvp(f, (x,), (x,)))(X)
    self.assertNotIn("deferred", str(caught.exception))

  def test_linear_transpose(self):
    f = lambda x: lax.platform_dependent(
        x, tpu=no_rules, default=lambda x: 3 * x)
    g = lambda x: jax.linear_transpose(f, x)(x)[0]
    self.assertAllClose(jax.jit(g)(X), 3 * X)
    with self.assertRaisesRegex(NotImplementedError, "no_rules"):
      tu.lower(g, X, platforms=("tpu",))

  def test_later_derivatives_raise_too(self):
    """The error depends on all that the branch depends on, not on tangents."""
    f = lambda x, y: lax.platform_dependent(
        x, y, tpu=lambda x, y: no_jvp(x) * y, default=lambda x, y: x * y)
    g = lambda y: jax.grad(lambda x: f(x, y).sum())(X)
    h = lambda y: jax.jvp(g, (y,), (y,))[1]
    self.assertAllClose(jax.jit(h)(X), X)
    with self.assertRaisesRegex(NotImplementedError, "no_jvp"):
      tu.lower(h, X, platforms=("tpu",))

  def test_shard_map(self):
    for branch in BRANCHES.values():
      f = elsewhere(branch)
      self.assertAllClose(
          jax.jit(jax.grad(lambda x: sharded(f, check=False)(x).sum()))(X),
          3 * np.cos(X), rtol=1e-5)
      self.assertAllClose(
          jax.jit(sharded(jax.vmap(jax.grad(f)), check=False))(X),
          3 * np.cos(X), rtol=1e-5)
      self.assertAllClose(
          jax.jit(jax.vmap(sharded(f, check=False)))(X[None]),
          3 * np.sin(X)[None], rtol=1e-5)

  @tu.requires("checked_shard_map")
  def test_checked_shard_map(self):
    """Its own check fails on a branch, too, from JAX 0.4.36 to 0.5.3."""
    for name, branch in BRANCHES.items():
      f = sharded(elsewhere(branch), check=True)
      self.assertAllClose(jax.jit(f)(X), reachable(X), rtol=1e-5)
      self.assertAllClose(jax.jit(jax.grad(lambda x: f(x).sum()))(X),
                          3 * np.cos(X), rtol=1e-5)
      self.assertAllClose(jax.jit(jax.vmap(f))(X[None]), reachable(X)[None],
                          rtol=1e-5)
      try:
        tu.lower(sharded(branch, check=True), X, platforms=("tpu",))
      except NotImplementedError as error:
        expected = str(error)
        with self.assertRaises(NotImplementedError) as caught:
          tu.lower(f, X, platforms=("tpu",))
        self.assertStartsWith(str(caught.exception), expected)
        for words in ("shard_map with check_rep=True", "branch for 'tpu'",
                      "deferral_test.py:"):
          self.assertIn(words, str(caught.exception))
      else:
        tu.lower(f, X, platforms=("tpu",))

  def test_io_effect(self):
    f = jax.vmap(elsewhere(io))
    self.assertAllClose(jax.jit(f)(X), reachable(X))
    with self.assertRaisesRegex(
        NotImplementedError, "IO effect not supported in vmap-of-cond"):
      tu.lower(f, X, platforms=("tpu",))

  @parameterized.parameters(
      ("remat", "rematerialization (jax.checkpoint)"),
      ("remat_scan", "rematerialization (jax.checkpoint)"),
      ("remat_jit", "rematerialization (jax.checkpoint)"),
      ("vmap_while", "batching (vmap) of a while loop"))
  def test_effect_of_a_whole_program(self, name, transformation):
    """What refuses it is not the rule of the conditional."""
    def transformed(f):
      vmap_while = jax.vmap(lambda x: lax.while_loop(
          lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (x, x))[1])
      return dict(all_transformations(f), vmap_while=vmap_while)[name]

    # Its derivative is refused before, unless it does not depend on the effect.
    for branch in (io, scan_of_io, independent_io):
      for f in (elsewhere(branch), elsewhere(elsewhere(branch)),
                lambda x: lax.platform_dependent(
                    x, tpu=doubling, default=elsewhere(branch))):
        f = transformed(f)
        self.assertAllClose(jax.jit(f)(X), transformed(reachable)(X), rtol=1e-5)
    f = transformed(elsewhere(independent_io))
    # It is an effect of the whole program, as the effect itself is.
    self.assertIn(deferral.deferred_error_effect, jax.make_jaxpr(f)(X).effects)
    with self.assertRaises(Exception) as caught:
      tu.lower(f, X, platforms=("tpu",))
    with self.assertRaises(Exception) as expected:
      tu.lower(transformed(independent_io), X, platforms=("tpu",))
    self.assertIs(type(caught.exception), type(expected.exception))
    self.assertStartsWith(str(caught.exception), str(expected.exception))
    for words in ("deferred", "branch for 'tpu'", transformation,
                  "deferral_test.py:"):
      self.assertIn(words, str(caught.exception))

    # If every branch has it, the error comes at once.
    f = transformed(lambda x: lax.platform_dependent(
        x, tpu=independent_io, default=lambda x: independent_io(x) + 1))
    with self.assertRaises(Exception) as caught:
      jax.make_jaxpr(f)(X)
    self.assertIn("ffect", str(caught.exception))
    self.assertNotIn("deferred", str(caught.exception))

  def test_error_of_an_effect_is_not_lost(self):
    """An unused branch with an effect is kept, and so is its error."""
    def f(x):
      elsewhere(io)(x)
      return x
    self.assertAllClose(jax.jit(jax.vmap(f))(X), X)
    with self.assertRaisesRegex(NotImplementedError, "vmap-of-cond"):
      tu.lower(jax.vmap(f), X, platforms=("tpu",))
    # One without is not.
    g = lambda x: (elsewhere(no_rules)(x), x)[1]
    tu.lower(jax.vmap(g), X, platforms=("tpu",))

  def test_checkify(self):
    unchecked_p = tu.doubling_primitive("unchecked")
    def rule(*_, **__):
      raise NotImplementedError("no error check")
    checkify_lib.error_checks[unchecked_p] = rule
    self.addCleanup(checkify_lib.error_checks.pop, unchecked_p)
    f = checkify.checkify(elsewhere(unchecked_p.bind))
    error, out = jax.jit(f)(X)
    self.assertIsNone(error.get())
    self.assertAllClose(out, reachable(X))
    with self.assertRaisesRegex(NotImplementedError, "no error check"):
      tu.lower(lambda x: f(x)[1], X, platforms=("tpu",))

  def test_discharge_of_state(self):
    no_discharge_p = core.Primitive("no_discharge")
    no_discharge_p.multiple_results = True
    no_discharge_p.def_effectful_abstract_eval(
        lambda ref: ([], {state_types.WriteEffect(0)}))
    def f(x):
      def body(ref):
        def write():
          ref[...] = ref[...] * 3
        def fail():
          no_discharge_p.bind(ref)
        lax.platform_dependent(tpu=fail, default=write)
      return discharge.run_state(body)(x)
    self.assertAllClose(jax.jit(f)(X), 3 * X)
    with self.assertRaisesRegex(NotImplementedError, "no_discharge"):
      tu.lower(f, X, platforms=("tpu",))

  @tu.requires("remat_by_tracing")
  def test_remat_by_tracing(self):
    no_remat_p = tu.doubling_primitive("no_remat")
    ad.deflinear2(no_remat_p, lambda ct, x: [2 * ct])
    def rule(*_, **__):
      raise NotImplementedError("no_remat has no rule")
    internals.remat_rules()[no_remat_p] = rule
    self.addCleanup(internals.remat_rules().pop, no_remat_p)
    with config.remat3(True):
      f = jax.grad(
          lambda x: jax.checkpoint(elsewhere(no_remat_p.bind))(x).sum())
      self.assertAllClose(jax.jit(f)(X), 3 * np.cos(X), rtol=1e-5)
      with self.assertRaisesRegex(
          NotImplementedError, "no_remat has no rule[^$]*rematerialization"):
        tu.lower(f, X, platforms=("tpu",))

  def test_exception_of_other_arguments(self):
    class TwoArgumentsError(ValueError):
      def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b

    class RepresentedError(KeyError):
      pass

    for make in (lambda: TwoArgumentsError("one", "two"),
                 lambda: RepresentedError("one\ntwo"),
                 lambda: UnicodeDecodeError("utf8", b"one", 0, 1, "two"),
                 lambda: FileNotFoundError(2, "one", "two")):
      def rule(primals, tangents):
        raise make()
      failing_p = tu.doubling_primitive("failing")
      ad.primitive_jvps[failing_p] = rule
      f = lambda x: jax.jvp(elsewhere(failing_p.bind), (x,), (x,))[1]
      with self.assertRaises(type(make())) as caught:
        tu.lower(f, X, platforms=("tpu",))
      self.assertIn(str(make()), str(caught.exception))
      self.assertIn("deferred", str(caught.exception))
      self.assertEqual(type(caught.exception).__name__, type(make()).__name__)

  def test_holds_nothing_of_the_exception(self):
    held = []

    class Local:
      pass

    def rule(primals, tangents):
      local = Local()
      held.append(weakref.ref(local))
      held.append(weakref.ref(tangents[0]))
      raise NotImplementedError("no rule")

    failing_p = tu.doubling_primitive("failing")
    ad.primitive_jvps[failing_p] = rule
    jaxpr = jax.make_jaxpr(
        lambda x: jax.jvp(elsewhere(failing_p.bind), (x,), (x,)))(X)
    gc.collect()
    self.assertNotEmpty(held)
    self.assertEmpty([ref for ref in held if ref() is not None])
    self.assertNotEmpty(tu.find_eqns(jaxpr, "deferred_error"))

  def test_same_error_of_same_program(self):
    errors = []
    for _ in range(2):
      f = lambda x: jax.jvp(elsewhere(no_jvp), (x,), (x,))
      eqn, = tu.find_eqns(jax.make_jaxpr(f)(X), "deferred_error")
      errors.append(eqn.params["deferred"])
    self.assertEqual(*errors)
    self.assertEqual(*map(hash, errors))
    self.assertIsInstance(errors[0], deferral.DeferredError)

  def test_same_module_in_every_process(self):
    program = """
        import sys
        sys.path[:0] = [{tests!r}]
        import jax, numpy as np
        import deferral_test as t
        import jcp_test_util as tu
        for name in ("grad", "vmap", "hessian", "grad_scan", "remat_vmap"):
          f = t.all_transformations(t.elsewhere(t.no_rules))[name]
          print(tu.lower(f, t.X, platforms=("cpu",)))
          print(tu.lower(f, t.X, platforms=("cpu", "cuda")))
        """.format(tests=__file__.rpartition("/")[0])
    texts = []
    for seed in "01":
      result = tu.run_python(program, PYTHONHASHSEED=seed)
      self.assertEqual(result.returncode, 0, result.stderr)
      texts.append(result.stdout)
    self.assertIn("stablehlo.cosine", texts[0])
    self.assertMultiLineEqual(*texts)

  def test_costs_nothing_if_no_branch_fails(self):
    """No rule is run again, nothing traced again, and the jaxpr is the same."""
    calls = collections.Counter()

    def counted(name, rule):
      def counted_rule(*args, **params):
        calls[name] += 1
        return rule(*args, **params)
      return counted_rule

    counted_p = core.Primitive("counted")
    counted_p.def_abstract_eval(counted("abstract_eval", lambda x: x))
    ad.primitive_jvps[counted_p] = counted(
        "jvp", lambda xs, ts: (counted_p.bind(*xs), counted_p.bind(*ts)))
    ad.primitive_transposes[counted_p] = counted(
        "transpose", lambda ct, x: [counted_p.bind(ct)])
    batching.primitive_batchers[counted_p] = counted(
        "batching", lambda xs, dims: (counted_p.bind(*xs), dims[0]))

    def branch(x):
      calls["trace"] += 1
      return jnp.sin(counted_p.bind(x))

    self.addCleanup(jax_cond_patch.activate, defer=True)
    for t in TRANSFORMED_DIRECTLY:
      with self.subTest(t):
        found = []
        for defer in (True, False):
          jax_cond_patch.activate(defer=defer)
          jax.clear_caches()
          calls.clear()
          f = all_transformations(elsewhere(lambda x: branch(x)))[t]
          found.append((str(jax.make_jaxpr(f)(X)), dict(calls)))
        self.assertEqual(*found)
        self.assertGreater(calls["trace"], 0)


class SwitchTest(tu.JcpTestCase):

  def test_argument(self):
    f = jax.vmap(elsewhere(no_rules))
    jax.make_jaxpr(f)(X)
    self.addCleanup(jax_cond_patch.activate, defer=True)
    jax_cond_patch.activate(defer=False)
    self.assertFalse(jax_cond_patch.status().defers)
    with self.assertRaises(NotImplementedError):
      jax.make_jaxpr(f)(X)
    # What was chosen stays.
    with jax_cond_patch.deactivated():
      self.assertFalse(jax_cond_patch.status().defers)
    with self.assertRaises(NotImplementedError):
      jax.make_jaxpr(f)(X)
    jax_cond_patch.activate(defer=True)
    self.assertTrue(jax_cond_patch.status().defers)
    jax.make_jaxpr(f)(X)

  @parameterized.parameters(("0", False), ("FALSE", False), ("1", True))
  def test_environment(self, value, defers):
    result = tu.run_python(
        "import jax_cond_patch; print(jax_cond_patch.status().defers)",
        JAX_COND_PATCH_DEFER=value)
    self.assertEqual(result.stdout.strip(), str(defers), result.stderr)

  def test_unknown_value(self):
    result = tu.run_python("import jax_cond_patch", JAX_COND_PATCH_DEFER="no")
    self.assertNotEqual(result.returncode, 0)
    self.assertIn("JAX_COND_PATCH_DEFER is 'no'", result.stderr)
    self.assertIn("must be one of 1, true, 0, false", result.stderr)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
