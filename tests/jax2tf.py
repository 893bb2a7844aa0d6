"""Converts platform conditionals by jax2tf, and runs them in TensorFlow.

`nox -s jax2tf` runs this; TensorFlow is not needed for anything else.
"""
from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
from jax.experimental import jax2tf
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import jax_cond_patch
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(1, 5, dtype=np.float32) / 4


def on_cpu(x):
  return jnp.sin(x) * 2.5


def choose(x):
  """Has branches that neither another platform nor a graph can hold."""
  return lax.platform_dependent(
      x, cpu=on_cpu, cuda=tu.only_on("cuda"), tpu=tu.only_on("tpu"))


def grad(f):
  return jax.grad(lambda x: f(x).sum())


def twice(f):
  return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


PROGRAMS = dict(
    plain=lambda f: f,
    jit=jax.jit,
    default=lambda f: f if f is on_cpu else lambda x: lax.platform_dependent(
        x, tpu=tu.only_on("tpu"), default=f),
    nested=lambda f: lambda x: lax.platform_dependent(
        x, cpu=f, default=lambda x: x),
    vmap=jax.vmap,
    grad=grad,
    grad_jit=lambda f: grad(jax.jit(f)),
    scan=twice,
    scan_grad=lambda f: grad(twice(f)),
    while_loop=lambda f: lambda x: lax.fori_loop(
        0, x.astype(int).sum(), lambda _, c: f(c), x),
    cond=lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    remat=lambda f: grad(jax.checkpoint(f)),
    remat_scan=lambda f: grad(twice(jax.checkpoint(f))),
    diagonal=lambda f: lambda x: jnp.diag(jnp.diag(f(x))),
)
MODES = dict(
    native={}, native_for_several=dict(
        native_serialization_platforms=("cpu", "cuda", "tpu")))
if internals.has_graph_conversion():
  MODES = {name: dict(native_serialization=True, **options)
           for name, options in MODES.items()}
  MODES.update(
      graph=dict(native_serialization=False),
      graph_without_xla=dict(native_serialization=False, enable_xla=False))
# What holds no code for other platforms than that of this machine.
MODES_FOR_HERE = [mode for mode in MODES if mode != "native_for_several"]


def convert(f, mode):
  return tf.function(jax2tf.convert(f, **MODES[mode]), autograph=False)


class Jax2TfTest(tu.JcpTestCase):

  @parameterized.product(mode=list(MODES), name=list(PROGRAMS))
  def test_value_and_gradient(self, mode, name):
    direct = PROGRAMS[name](on_cpu)
    converted = convert(PROGRAMS[name](choose), mode)
    self.assertAllClose(converted(X).numpy(), direct(X), rtol=1e-5)
    if name == "while_loop":
      return  # It has no gradient.
    x = tf.Variable(X)
    with tf.GradientTape() as tape:
      y = converted(x)
    self.assertAllClose(tape.gradient(y, x).numpy(), grad(direct)(X), rtol=1e-5)

  @parameterized.product(mode=list(MODES))
  def test_saved(self, mode):
    module = tf.Module()
    module.f = tf.function(
        jax2tf.convert(choose, **MODES[mode]), autograph=False,
        input_signature=[tf.TensorSpec(X.shape, X.dtype)])
    path = self.create_tempdir().full_path
    tf.saved_model.save(module, path)
    self.assertAllClose(
        tf.saved_model.load(path).f(X).numpy(), on_cpu(X), rtol=1e-5)

  @parameterized.product(mode=list(MODES))
  def test_ordinary_conditional(self, mode):
    f = lambda x: lax.switch(
        x[0].astype(int), [jnp.sin, jnp.cos, jnp.tan], x)
    self.assertAllClose(convert(f, mode)(X).numpy(), np.sin(X), rtol=1e-5)
    self.assertAllClose(convert(f, mode)(X + 1).numpy(), np.cos(X + 1),
                        rtol=1e-5)

  @parameterized.product(mode=list(MODES))
  def test_no_branch(self, mode):
    f = lambda x: lax.platform_dependent(x, cuda=jnp.sin, tpu=jnp.cos)
    for f in (f, jax.jit(f), twice(f)):
      with self.assertRaisesRegex(
          NotImplementedError, r"no branch for 'cpu'.*tests/jax2tf\.py"):
        convert(f, mode)(X)

  @parameterized.product(mode=MODES_FOR_HERE)
  def test_error_that_was_deferred(self, mode):
    """It does not come from what is not reached, and else as it was."""
    def without_jvp(x):
      return lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, x)
    f = grad(jax.jit(lambda x: lax.platform_dependent(
        x, tpu=without_jvp, default=on_cpu)))
    self.assertAllClose(
        convert(f, mode)(X).numpy(), grad(on_cpu)(X), rtol=1e-5)
    f = grad(jax.jit(lambda x: lax.platform_dependent(
        x, cpu=without_jvp, default=on_cpu)))
    with self.assertRaisesRegex(ValueError, "Reverse-mode differentiation"):
      convert(f, mode)(X)

  @parameterized.product(mode=MODES_FOR_HERE)
  def test_pinned(self, mode):
    self.addCleanup(jax_cond_patch.pin, None)
    jax_cond_patch.pin("cpu")
    self.assertAllClose(
        convert(jax.jit(choose), mode)(X).numpy(), on_cpu(X), rtol=1e-5)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
