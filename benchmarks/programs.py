"""The programs that are measured, each with branches and called directly.

A site is a place where a model has a platform conditional: a layer with a
branch for each platform, or, called directly, that of the CPU.
"""
import functools

import jax
from jax import export
from jax import lax
from jax._src import core
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "other1", "other2", "other3",
             "other4")
X = np.ones((16, 16), np.float32)


def layer(x, w, b, scale):
  return jnp.tanh(x @ w + b) * scale


# What the layers of a model differ in: nothing, a constant, or weights of their
# own that they close over.
LAYERS = ("equal", "different", "closed over")


def _layer_of(site, kind, scale):
  if kind == "different":
    scale += site / 1024
  if kind != "closed over":
    return functools.partial(layer, scale=scale)
  return lambda x, w, b: layer(x, w + _weights(site, len(x)), b, scale)


@functools.cache
def _weights(site, size):
  return np.full((size, size), 1 + site / 1024, np.float32)


def model(num_branches, layers="equal"):
  """A model with branches: x, weights, bias -> x.

  Args:
    num_branches: how many branches each site has.
    layers: one of `LAYERS`.
  """
  def f(x, ws, b):
    for site, w in enumerate(ws):
      x = lax.platform_dependent(x, w, b, **{
          platform: _layer_of(site, layers, i + 1.5)
          for i, platform in enumerate(PLATFORMS[:num_branches])})
    return x
  return f


def direct(num_branches, layers="equal"):
  del num_branches
  def f(x, ws, b):
    for site, w in enumerate(ws):
      x = _layer_of(site, layers, 1.5)(x, w, b)
    return x
  return f


def switches(num_branches):
  """Ordinary conditionals, which the package is to leave alone."""
  def f(x, ws, b):
    index = x[0, 0].astype(jnp.int32)
    for w in ws:
      x = lax.switch(index, [functools.partial(layer, scale=i + 1.5)
                             for i in range(num_branches)], x, w, b)
    return x
  return f


def nested(f, depth=3):
  """A model in branches of branches."""
  def g(x, ws, b):
    if not depth:
      return f(x, ws, b)
    return lax.platform_dependent(
        x, ws, b, cpu=nested(f, depth - 1), default=lambda x, ws, b: x)
  return g


def _gradient(f):
  return jax.grad(lambda *args: f(*args).sum(), argnums=(0, 1, 2))


def _scanned(f):
  def g(x, ws, b):
    return lax.scan(
        lambda x, w: (f(x, [w], b), None), x, jnp.stack(ws))[0]
  return g


# What is done to a model, and to the one that is called directly.
TRANSFORMATIONS = dict(
    forward=lambda f: f,
    gradient=_gradient,
    vmap=lambda f: lambda x, ws, b: jax.vmap(
        f, in_axes=(0, None, None))(jnp.stack([x, x]), ws, b),
    scan=lambda f: _gradient(_scanned(f)),
    remat=lambda f: _gradient(jax.checkpoint(f)))


def make_shared_helper(num_layers):
  """A model in two branches and in a lowering rule; layers share a helper."""
  @jax.jit
  def helper(x):
    return jnp.sin(x) + lax.platform_dependent(
        x, tpu=lambda x: x * 2., default=lambda x: x * 3.)

  def layers(x):
    for _ in range(num_layers):
      x = helper(x)
    return x

  primitive = core.Primitive("benchmark_model")
  primitive.def_abstract_eval(lambda x: x)
  rule = mlir.lower_fun(layers, multiple_results=False)
  mlir.register_lowering(primitive, rule)
  mlir.register_lowering(primitive, rule, platform="cpu")

  def program(x):
    return lax.platform_dependent(
        layers(x), tpu=lambda x: layers(x),
        default=lambda x: layers(primitive.bind(x)))
  return program


def exported(f, *args):
  return export.export(jax.jit(f), platforms=PLATFORMS[:4])(*args).mlir_module()
