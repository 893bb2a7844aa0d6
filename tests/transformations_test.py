"""Tests of platform conditionals under everything that transforms programs.

Each program is made of `choose`, or of the branch that runs on a platform. Both
must compute the same and, but for the exceptions listed here, be lowered to the
same operations.
"""
import collections
import contextlib
import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import custom_batching
from jax import lax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe
from jax._src.state.discharge import run_state
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
from jax.experimental import jet
from jax.experimental import sparse
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import jax_cond_patch
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4


def on_tpu(x):
  return jnp.cos(x) * 3.5


def elsewhere(x):
  return jnp.sin(x) * 2.5


def choose(x):
  return lax.platform_dependent(x, tpu=on_tpu, default=elsewhere)


def dispatch(wrap):
  """Returns what wraps a function, or in `choose` each of its branches."""
  def wrapped(f):
    if f is not choose:
      return wrap(f)
    return lambda *args: lax.platform_dependent(
        *args, tpu=wrap(on_tpu), default=wrap(elsewhere))
  return wrapped


def custom_jvp(f):
  g = jax.custom_jvp(f)
  g.defjvp(lambda primals, tangents: (
      f(*primals), f(*primals) * tangents[0]))
  return g


def custom_vjp(f):
  g = jax.custom_vjp(f)
  g.defvjp(lambda x: (f(x), x), lambda x, ct: (f(x) * ct,))
  return g


def custom_vmap(f):
  g = custom_batching.custom_vmap(f)
  g.def_vmap(lambda axis_size, in_batched, x: (f(x), True))
  return g


def grad(f):
  return jax.grad(lambda x: f(x).sum())


def twice(f):
  def g(x):
    return lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
  return g


def checked(f, errors=checkify.user_checks):
  def g(x):
    y = f(x)
    checkify.check(jnp.all(y < 100), "too big")
    return y / x
  return lambda x: checkify.checkify(g, errors=errors)(x)[1]


def remat(f, policy):
  return grad(jax.checkpoint(
      lambda x: f(checkpoint_name(f(x), "first")), policy=policy))


def write_choice(f, ref):
  """Writes to a reference, in branches if `f` is `choose`."""
  if f is not choose:
    ref[...] = f(ref[...])
    return
  def write(branch):
    def write_():
      ref[...] = branch(ref[...])
    return write_
  lax.platform_dependent(tpu=write(on_tpu), default=write(elsewhere))


def writing(f):
  return run_state(lambda ref: write_choice(f, ref))


def reading(f):
  """Reads a reference in branches, and writes to another outside of them."""
  def body(refs):
    x_ref, y_ref = refs
    y_ref[...] = dispatch(lambda branch: lambda _: branch(x_ref[...]))(f)(0)
  def body_of_branch(refs):
    x_ref, y_ref = refs
    y_ref[...] = f(x_ref[...])
  run = run_state(body if f is choose else body_of_branch)
  return lambda x: run((x, x))[1]


def new_ref(x):
  return (jax.new_ref if hasattr(jax, "new_ref") else core.mutable_array)(x)


def with_ref(f, length=None):
  def g(x):
    ref = new_ref(x)
    if length is None:
      write_choice(f, ref)
    else:
      lax.scan(lambda c, _: (write_choice(f, ref), None), None, None, length)
    return ref[...]
  return g


def sharded(f, check):
  if hasattr(jax, "shard_map"):
    shard_map = functools.partial(jax.shard_map, check_vma=check)
  else:
    from jax.experimental import shard_map as shard_map_lib
    shard_map = functools.partial(shard_map_lib.shard_map, check_rep=check)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
  return shard_map(lambda x: f(x) + lax.psum(x, "i"), mesh=mesh,
                   in_specs=P("i"), out_specs=P("i"))


def linear(f):
  """A linear function of each platform, since `f` is none."""
  by = dict(tpu=lambda x: x * 3.5, default=lambda x: x * 2.5)
  if f is choose:
    return lambda x: lax.platform_dependent(x, **by)
  return by["tpu" if f is on_tpu else "default"]


def sparsified(f):
  def g(x):
    m = sparse.BCOO.fromdense(np.diag(X), nse=4)
    return sparse.sparsify(linear(f))(m).data * x
  return g


def random_branches(f):
  def g(x):
    with jax.debug_key_reuse(True):
      return dispatch(lambda branch: lambda x, key: (
          branch(x) + jax.random.uniform(key, x.shape)))(f)(
              x, jax.random.key(0))
  return g


def rebound(f, bind):
  """Walks a jaxpr and binds its equations again, as other libraries do."""
  def g(x):
    closed_jaxpr = jax.make_jaxpr(f)(x)
    jaxpr = internals.open_jaxpr(closed_jaxpr)
    env = dict(zip(jaxpr.invars, [x]))
    def read(atom):
      return atom.val if isinstance(atom, core.Literal) else env[atom]
    for eqn in jaxpr.eqns:
      outs = bind(eqn, map(read, eqn.invars))
      env.update(zip(eqn.outvars,
                     outs if eqn.primitive.multiple_results else [outs]))
    return read(jaxpr.outvars[0])
  return g


def bind_with_params(eqn, args):
  return eqn.primitive.bind(*args, **eqn.params)


cond_p = internals.cond_p


def jvp_rule(primals, tangents, *, branches, linear=None):
  """A rule of another library, which knows no param but JAX's own.

  They are `branches` and, up to JAX 0.4.30, `linear`.
  """
  params = {} if linear is None else dict(linear=linear * 2)
  index, *primals = primals
  _, *tangents = map(ad.instantiate_zeros, tangents)
  branches = tuple(ad.jvp_jaxpr(
      branch, [True] * len(primals), True)[0] for branch in branches)
  outs = cond_p.bind(index, *primals, *tangents, branches=branches, **params)
  return outs[:len(outs) // 2], outs[len(outs) // 2:]


def without_second(f):
  """Has JAX drop what computes an output that nobody uses."""
  def g(x):
    jaxpr = jax.make_jaxpr(lambda x: (f(x), f(x * 2)))(x)
    live, _ = pe.dce_jaxpr(internals.open_jaxpr(jaxpr), [True, False])
    return core.eval_jaxpr(live, (), x)[0]
  return g


def exported_gradient(f, platforms=("cpu", "tpu")):
  def g(x):
    exported = tu.export(jax.jit(f), platforms=platforms)(x)
    return grad(tu.reloaded(exported, vjp_order=1).call)(x)
  return g


def fusible(f):
  try:
    from jax._src.pallas.fuser import fusible_dtype
  except ImportError:  # JAX 0.5.3
    from jax._src.pallas.fuser import fusable_dtype as fusible_dtype
  return jax.jit(fusible_dtype.physicalize(f))


def closed_call(f):
  def g(x):
    params = core.closed_call_p.get_bind_params(
        dict(call_jaxpr=jax.make_jaxpr(f)(x)))
    # Older JAX has a function of the jaxpr before the operands.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    return core.closed_call_p.bind(*subfuns, x, **params)[0]
  return g


def evaluated(f):
  def g(x):
    jaxpr = jax.make_jaxpr(f)(x)
    return core.jaxpr_as_fun(jaxpr)(x)[0]
  return g


def stack(f):
  return lambda x: f(jnp.stack([x, x]))


ALL_CHECKS = checkify.all_checks
POLICIES = jax.checkpoint_policies

TRANSFORMATIONS = dict(
    jvp=lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    vjp=lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
    jacfwd=lambda f: jax.jacfwd(jax.jit(f)),
    jacrev=lambda f: jax.jacrev(jax.jit(f)),
    hessian=lambda f: jax.hessian(lambda x: jax.jit(f)(x).sum()),
    forward_over_reverse=lambda f: jax.jacfwd(grad(jax.jit(f))),
    reverse_over_forward=lambda f: jax.jacrev(jax.jacfwd(jax.jit(f))),
    reverse_over_reverse=lambda f: grad(grad(jax.jit(f))),
    linearize=lambda f: lambda x: jax.linearize(jax.jit(f), x)[1](x),
    linear_transpose=lambda f: lambda x: jax.linear_transpose(
        linear(f), x)(x)[0],
    linear_transpose_jit=lambda f: lambda x: jax.linear_transpose(
        jax.jit(linear(f)), x)(x)[0],
    custom_jvp_around=lambda f: grad(custom_jvp(f)),
    custom_jvp_inside=lambda f: grad(dispatch(custom_jvp)(f)),
    custom_vjp_around=lambda f: jax.vmap(grad(custom_vjp(f))),
    custom_vjp_inside=lambda f: grad(dispatch(custom_vjp)(f)),
    custom_vjp_inside_jit=lambda f: grad(jax.jit(dispatch(custom_vjp)(f))),
    custom_vmap_around=lambda f: jax.vmap(custom_vmap(f)),
    custom_vmap_inside=lambda f: jax.vmap(dispatch(custom_vmap)(f)),
    remat_nothing=lambda f: remat(f, POLICIES.nothing_saveable),
    remat_everything=lambda f: remat(f, POLICIES.everything_saveable),
    remat_dots=lambda f: twice(grad(jax.checkpoint(
        lambda x: f(jnp.tan(x)), policy=POLICIES.dots_saveable))),
    remat_names=lambda f: remat(f, POLICIES.save_only_these_names("first")),
    vmap_spmd_axis_name=lambda f: stack(jax.vmap(f, spmd_axis_name="i")),
    vmap_axis_name=lambda f: jax.vmap(
        lambda x: f(x) + lax.psum(x, "i"), axis_name="i"),
    vmap_nested=lambda f: stack(jax.vmap(jax.vmap(f))),
    pmap=lambda f: lambda x: jax.pmap(f)(x[None]),
    scan=twice,
    scan_grad=lambda f: grad(twice(f)),
    while_loop=lambda f: lambda x: lax.while_loop(
        lambda c: jnp.sum(c) < 9, lambda c: f(c) + 1, x),
    while_condition=lambda f: lambda x: lax.while_loop(
        lambda c: jnp.sum(f(c)) < 1, lambda c: c + 1, x),
    fori_loop=lambda f: lambda x: lax.fori_loop(0, 3, lambda _, c: f(c), x),
    cond=lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    cond_mapped=lambda f: jax.vmap(
        lambda x: lax.cond(x > 0.5, f, lambda x: x, x)),
    associative_scan=lambda f: lambda x: lax.associative_scan(
        lambda a, b: f(a) + b, x),
    reduce=lambda f: lambda x: lax.reduce(
        x, np.float32(0), lambda a, b: f(a) + b, (0,)),
    closure_convert=lambda f: lambda x: (lambda g, consts: g(x, *consts))(
        *jax.closure_convert(lambda y: f(y) + x, x)),
    closed_call=closed_call,
    closed_call_grad=lambda f: grad(closed_call(f)),
    closed_call_remat=lambda f: grad(jax.checkpoint(closed_call(f))),
    named_call=lambda f: grad(jax.named_call(f, name="named")),
    dce=without_second,
    eval_jaxpr=evaluated,
    rebound=lambda f: rebound(f, bind_with_params),
    rebound_jit=lambda f: jax.jit(rebound(f, bind_with_params)),
    checkify_user_checks=checked,
    checkify_all_checks=lambda f: checked(f, ALL_CHECKS),
    checkify_scan=lambda f: checked(twice(f), ALL_CHECKS),
    checkify_grad=lambda f: checked(grad(f), ALL_CHECKS),
    checkify_inside=lambda f: lambda x: checkify.checkify(
        dispatch(lambda branch: lambda x: (
            checkify.check(jnp.less(x[0], 9), "big"), branch(x))[1])(f))(x)[1],
    run_state=writing,
    run_state_read=reading,
    refs=with_ref,
    refs_in_scan=lambda f: with_ref(f, length=3),
    sparse=sparsified,
    sparse_operand=lambda f: lambda x: sparse.sparsify(
        lambda m, x: f(m @ x))(sparse.BCOO.fromdense(np.diag(X), nse=4), x),
    key_reuse=random_branches,
    fusible=fusible,
    export_vjp=exported_gradient,
    shard_map_checked=lambda f: sharded(f, True),
    shard_map_checked_grad=lambda f: grad(sharded(f, True)),
    shard_map_checked_vmap=lambda f: stack(jax.vmap(sharded(f, True))),
    shard_map_unchecked=lambda f: sharded(f, False),
    shard_map_unchecked_grad=lambda f: grad(sharded(f, False)),
    shard_map_unchecked_vmap=lambda f: stack(jax.vmap(sharded(f, False))),
)

# What a release must have for them.
REQUIRED = dict(
    refs=["refs"], refs_in_scan=["refs"], key_reuse=["key_reuse"],
    fusible=["fusible"], shard_map_checked=["checked_shard_map"],
    shard_map_checked_grad=["checked_shard_map"],
    shard_map_checked_vmap=["checked_shard_map", "vmap_of_checked_psum"],
    closed_call_grad=["checked_derivative_of_closed_call"])

# They linearize, for which JAX has two ways from 0.5.3 on.
LINEARIZING = (
    "vjp", "jacrev", "hessian", "forward_over_reverse", "reverse_over_reverse",
    "linearize", "custom_jvp_inside", "custom_vjp_inside", "remat_names",
    "scan_grad", "closed_call_grad", "checkify_grad", "shard_map_checked_grad")


# With the diffs JAX joins what the branches save and what they need in second
# derivatives, as it does for all conditionals: what one alone needs is in the
# others, too.
JOINED_WITH_THE_DIFFS = ("custom_vjp_inside_jit", "reverse_over_forward",
                         "reverse_over_reverse")


def operations(text):
  return collections.Counter(
      re.findall(r"(?:stablehlo|chlo|mhlo|sdy|func)\.\w+", text))


class TransformationsTest(tu.JcpTestCase):

  def setUp(self):
    super().setUp()
    # `fusible` makes a list of the branches of any conditional up to JAX 0.6,
    # which JAX's own checks refuse.
    if not internals.native:
      self.enter_context(config.enable_checks(False))

  def transformation(self, name):
    for feature in REQUIRED.get(name, ()):
      self.requires(feature)
    return TRANSFORMATIONS[name]

  @parameterized.parameters(*TRANSFORMATIONS)
  def test_value(self, name):
    self.check_value(name)

  @parameterized.parameters(*TRANSFORMATIONS)
  def test_module(self, name):
    self.check_module(name)

  def check_value(self, name):
    transform = self.transformation(name)
    expected = transform(elsewhere)(X)
    transformed = transform(choose)
    self.assertAllClose(jax.jit(transformed)(X), expected, rtol=1e-5)
    self.assertAllClose(transformed(X), expected, rtol=1e-5)

  def check_module(self, name):
    for platform, owner in (("cpu", elsewhere), ("tpu", on_tpu)):
      transform = self.transformation(name)
      if name == "export_vjp":
        transform = functools.partial(transform, platforms=(platform,))
      ops = operations(tu.lower(transform(choose), X, platforms=(platform,)))
      direct = operations(tu.lower(transform(owner), X, platforms=(platform,)))
      if name == "shard_map_unchecked_grad":
        # The scalar constant of a branch is in both halves; JAX hands that of
        # a function from one to the other as an array of one element, which up
        # to JAX 0.4.35 is sharded.
        self.assertLessEqual(set(direct - ops), {
            "stablehlo.broadcast_in_dim", "stablehlo.reshape",
            "stablehlo.custom_call", "mhlo.sharding"})
        direct &= ops
      if name in JOINED_WITH_THE_DIFFS and not tu.has("package"):
        self.assertContainsSubset(+direct, +ops)
        self.assertEqual(ops["stablehlo.case"], direct["stablehlo.case"])
        continue
      self.assertEqual(+ops, +direct, platform)

  @parameterized.parameters(*LINEARIZING)
  @tu.requires("direct_linearize")
  def test_other_linearization(self, name):
    if name.startswith("shard_map"):
      self.requires("direct_linearize_of_shard_map")
    with config.use_direct_linearize(not config.use_direct_linearize.value):
      self.check_value(name)
      self.check_module(name)

  @parameterized.parameters(writing, reading)
  @tu.requires("package")
  def test_gradient_of_run_state(self, make):
    for transform in (grad, lambda f: grad(jax.jit(f)),
                      lambda f: grad(twice(f))):
      try:
        expected = transform(make(elsewhere))(X)
      except ValueError as error:  # JAX 0.7.1 and later
        with self.assertRaises(ValueError) as raised:
          transform(make(choose))(X)
        self.assertEqual(str(raised.exception), str(error))
        continue
      self.assertAllClose(transform(make(choose))(X), expected, rtol=1e-5)
      text = tu.lower(transform(make(choose)), X, platforms=("tpu",))
      self.assertNotIn("stablehlo.case", text)
      self.assertNotIn("dense<2.5", text)

  def test_module_of_gradient_exported_for_several_platforms(self):
    """Each half has one `case`, with what each platform has alone."""
    text, on_tpu_text, elsewhere_text = (
        tu.lower(exported_gradient(f), X, platforms=("cpu",))
        for f in (choose, on_tpu, elsewhere))
    # JAX has one for the platforms that are called.
    self.assertEqual(tu.count_ops(text, "stablehlo.case"),
                     tu.count_ops(elsewhere_text, "stablehlo.case") + 2)
    for op in ("sine", "cosine", "negate", "multiply"):
      op = f"stablehlo.{op}"
      self.assertEqual(tu.count_ops(text, op), tu.count_ops(on_tpu_text, op) +
                       tu.count_ops(elsewhere_text, op), op)

  @parameterized.parameters(*TRANSFORMATIONS)
  def test_module_for_several_platforms(self, name):
    make = self.transformation(name)
    self.assertRunsAs(make(choose), dict(
        cpu=jax.jit(make(elsewhere)), tpu=jax.jit(make(on_tpu))), X, rtol=1e-5)

def compute_on2(f):
  from jax._src.compute_on import compute_on2
  return compute_on2(f, compute_type="device_host",
                     out_memory_spaces=jax.memory.Space.Device)


ON_HOST = dict(
    region=tu.host_region,
    jit_inside=lambda f: tu.host_region(jax.jit(f)),
    jit_outside=lambda f: jax.jit(tu.host_region(f)),
    scan=lambda f: twice(tu.host_region(f)),
    vmap=lambda f: stack(jax.vmap(tu.host_region(f))),
    grad=lambda f: grad(tu.host_region(f)),
    grad_jit=lambda f: grad(jax.jit(tu.host_region(f))),
    grad_scan=lambda f: grad(twice(tu.host_region(f))),
    remat=lambda f: grad(jax.checkpoint(tu.host_region(f))),
    remat_scan=lambda f: grad(twice(jax.checkpoint(tu.host_region(f)))),
    dce=lambda f: without_second(tu.host_region(f)),
    compute_on2=compute_on2,
    compute_on2_jit=lambda f: compute_on2(jax.jit(f)),
    compute_on2_grad=lambda f: grad(compute_on2(f)),
)


class ComputeOnTest(tu.JcpTestCase):

  @parameterized.product(name=list(ON_HOST), platform=("tpu", "cuda"))
  def test_host_code_is_for_the_cpu(self, name, platform):
    def choose(x):
      return lax.platform_dependent(
          x, cpu=lambda x: jnp.sin(x) * 1.5, cuda=tu.marked(2.5),
          tpu=tu.marked(3.5), default=tu.marked(4.5))
    self.requires("compute_on2" if "2" in name else "compute_on")
    transform = ON_HOST[name]
    text = tu.lower(transform(choose), X, platforms=(platform,))
    direct = tu.lower(transform(lambda x: jnp.sin(x) * 1.5), X,
                      platforms=(platform,))
    self.assertNotIn("stablehlo.case", text)
    self.assertEqual(set(re.findall(r"dense<(\d\.5)", text)), {"1.5"})
    self.assertEqual(text.count("_xla_compute_type"),
                     direct.count("_xla_compute_type"))
    self.assertGreater(text.count("_xla_compute_type"), 0)

  @tu.requires("compute_on")
  def test_what_is_outside_is_for_the_device(self):
    f = lambda x: tu.host_region(choose)(x) + choose(x)
    text = tu.lower(f, X, platforms=("tpu",))
    self.assertEqual(tu.count_ops(text, "stablehlo.sine"), 1)
    self.assertEqual(tu.count_ops(text, "stablehlo.cosine"), 1)
    self.assertNotIn("stablehlo.case", text)


class OtherInterpretersTest(tu.JcpTestCase):

  @tu.requires("package")
  def test_rebound_without_platforms(self):
    """A rule that knows only `branches` leaves an index that is known."""
    def bind(eqn, args):
      if eqn.primitive is not internals.cond_p:
        return bind_with_params(eqn, args)
      return internals.cond_p.bind(*args, **{
          name: value for name, value in eqn.params.items()
          if name != tu.PLATFORMS})
    f = rebound(choose, bind)
    self.assertAllClose(jax.jit(f)(X), elsewhere(X), rtol=1e-5)
    self.assertAllClose(f(X), elsewhere(X), rtol=1e-5)
    self.assertAllClose(jax.jit(grad(f))(X), grad(elsewhere)(X), rtol=1e-5)
    self.assertRunsAs(f, dict(cpu=elsewhere, cuda=elsewhere, tpu=on_tpu), X)
    text = tu.lower(f, X, platforms=("tpu",))
    self.assertNotIn("stablehlo.case", text)
    self.assertNotIn("stablehlo.sine", text)

  @parameterized.parameters("before", "after")
  def test_strict_rule_registered(self, when):
    """One that JAX has when it is patched is called without the platforms.

    In the native era, and with the diffs, JAX itself calls a rule with its own
    param.
    """
    jvp = lambda f: lambda x: jax.jvp(jax.jit(lambda x: f(x)), (x,), (x,))[1]
    registering = (jax_cond_patch.deactivated if when == "before" else
                   contextlib.nullcontext)
    with registering():
      original = ad.primitive_jvps[cond_p]
      ad.primitive_jvps[cond_p] = jvp_rule
      try:
        with jax_cond_patch.activated():
          self.assertAllClose(
              jvp(lambda x: lax.cond(x[0] > 0, elsewhere, on_tpu, x))(X),
              jvp(elsewhere)(X), rtol=1e-5)
          if (when == "before" and not internals.native and
              tu.has("package")):
            self.assertAllClose(jvp(choose)(X), jvp(elsewhere)(X), rtol=1e-5)
            text = tu.lower(jvp(choose), X, platforms=("tpu",))
            self.assertNotIn("stablehlo.case", text)
          else:
            with self.assertRaisesRegex(TypeError, f"'{tu.PLATFORMS}'"):
              jvp(choose)(X)
      finally:
        ad.primitive_jvps[cond_p] = original

  def test_printed(self):
    jaxpr = jax.make_jaxpr(jax.jit(choose))(X)
    shown = f"{tu.PLATFORMS}=(('tpu',), None)"
    self.assertIn(shown, str(jaxpr))
    for options in (dict(source_info=True), dict(print_shapes=False),
                    dict(custom_pp_eqn_rules=False)):
      self.assertIn(shown, jaxpr.pretty_print(use_color=False, **options))

  @tu.requires("high_types")
  def test_high_types(self):
    """JAX 0.7.2 to 0.9.0.1 refuse its own param where they are lowered."""
    from jax._src.hijax import new_box
    def double(x):
      box = new_box()
      box.set(x)
      box.set(box.get() + box.get())
      return box.get()
    f = lambda x: lax.platform_dependent(x, tpu=on_tpu, default=double)
    self.assertAllClose(jax.jit(f)(X), 2 * X)
    self.assertNotIn("case", tu.lower(jax.jit(f), X, platforms=("cpu",)))

  @tu.requires("package")
  def test_jet_where_the_branch_is_known(self):
    """JAX has no rule for conditionals, and there is none."""
    def jet_of(f):
      return lambda x: jet.jet(f, (x,), ((x, x),))
    expected = jet_of(elsewhere)(X)
    self.assertAllClose(jet_of(choose)(X), expected, rtol=1e-5)
    self.addCleanup(jax_cond_patch.pin, None)
    jax_cond_patch.pin(("cpu",))
    for make in (jet_of, lambda f: jax.jit(jet_of(f)),
                 lambda f: jet_of(jax.jit(f))):
      self.assertAllClose(make(choose)(X), expected, rtol=1e-5)
      self.assertEqual(
          operations(tu.lower(make(choose), X, platforms=("cpu",))),
          operations(tu.lower(make(elsewhere), X, platforms=("cpu",))))

  @parameterized.parameters(
      choose, lambda x: lax.cond(x[0] > 0, elsewhere, on_tpu, x))
  def test_no_jet(self, f):
    """The error is JAX's own."""
    errors = []
    for context in (jax_cond_patch.activated, jax_cond_patch.deactivated):
      with context(), self.assertRaises(Exception) as raised:
        jax.jit(lambda x: jet.jet(f, (x,), ((x, x),)))(X)
      errors.append(repr(raised.exception))
    self.assertEqual(*errors)

  @parameterized.parameters(True, False)
  @tu.requires("optional_varying_axes")
  def test_shard_map_that_rewrites(self, check):
    """JAX 0.6.0 rewrites if there are no varying axes, and before."""
    with config.varying_axes_in_types(False):
      for transform in (lambda f: f, grad, lambda f: stack(jax.vmap(f))):
        f = transform(sharded(choose, check))
        expected = transform(sharded(elsewhere, check))(X)
        self.assertAllClose(jax.jit(f)(X), expected, rtol=1e-5)
        self.assertAllClose(f(X), expected, rtol=1e-5)
        self.assertNotIn("stablehlo.case", tu.lower(f, X, platforms=("cpu",)))

  @tu.requires("roofline_of_conditionals")
  def test_roofline(self):
    from jax.experimental import roofline
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    roofline.roofline(choose, mesh=mesh, in_specs=P(), out_specs=P())(
        jax.ShapeDtypeStruct(X.shape, X.dtype))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
