"""Prints the StableHLO text of many programs, as JSON.

Both vehicles, the package and the diffs, give the same text for them; see
patched_test.py.
"""
from __future__ import annotations

import json
import re
import sys

import jax
from jax import lax
from jax.experimental import checkify
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np

import jcp_test_util as tu
import random_programs

X = np.arange(1, 5, dtype=np.float32)
PLATFORMS = (("cpu",), ("tpu",), ("cpu", "tpu"), ("tpu", "cuda", "cpu"))
RANDOM_PROGRAMS = 40


def choose(x):
  y = jnp.cosh(x)
  return lax.platform_dependent(
      x, y, cpu=lambda x, y: tu.only_on("cpu")(jnp.sin(x)),
      tpu=lambda x, y: tu.only_on("tpu")(jnp.sin(x)) * jnp.sum(x),
      default=lambda x, y: jnp.cos(x) * y)


def nested(x):
  inner = lambda x: lax.platform_dependent(
      x, cuda=tu.only_on("cuda"), tpu=lambda x: tu.only_on("tpu")(x) + 1,
      default=jnp.tan)
  return lax.platform_dependent(x, cpu=lambda x: x - 1, default=inner)


def helper(x):
  inner = jax.jit(choose)
  return lax.platform_dependent(
      inner(x), cpu=lambda x: inner(x) * 2, default=lambda x: inner(x) * 3)


def ordered_effect(x):
  def called(x):
    return io_callback(lambda x: x, x, x, ordered=True)
  return lax.platform_dependent(x, rocm=called, default=jnp.sin)


def sum_of(f):
  return lambda x: jnp.sum(jnp.sin(f(x)))


def of(choose):
  """Transformations of a function with platform conditionals."""
  return dict(
      plain=choose,
      jit=jax.jit(lambda x: choose(x)),
      grad=jax.grad(sum_of(choose)),
      hessian=jax.hessian(sum_of(choose)),
      jvp=lambda x: jax.jvp(choose, (x,), (x,)),
      linearize=lambda x: jax.linearize(choose, x)[1](x),
      vmap=jax.vmap(choose),
      vmap_grad=jax.vmap(jax.grad(sum_of(choose))),
      scan=lambda x: lax.scan(lambda c, y: (choose(c), y), x, X)[0],
      grad_scan=jax.grad(lambda x: jnp.sum(lax.scan(
          lambda c, _: (jnp.sin(choose(c)), None), x, None, length=3)[0])),
      while_loop=lambda x: lax.while_loop(lambda c: c[0] < 9, choose, x),
      remat=jax.grad(sum_of(jax.checkpoint(choose))),
      cond=lambda x: lax.cond(x[0] > 2, choose, jnp.sin, x),
      grad_cond=jax.grad(lambda x: sum_of(
          lambda x: lax.cond(x[0] > 2, choose, jnp.sin, x))(x)),
      checkify=lambda x: checkify.checkify(choose)(x)[1])


def drawn_programs() -> list:
  found = []

  @random_programs.sampling(RANDOM_PROGRAMS, seed=0)
  def draw(program):
    found.append(program)

  draw()
  return found


def texts() -> dict[str, str]:
  found = {}
  functions = dict(nested=nested, helper=helper, ordered_effect=ordered_effect)
  for name, fun in {**of(choose), **functions}.items():
    for platforms in PLATFORMS:
      found[f"{name} for {platforms}"] = tu.lower(
          lambda x: fun(x), X, platforms=platforms)
  for i, program in enumerate(drawn_programs()):
    found[f"random program {i}: {program}"] = tu.lower(
        program.function(), np.float32(.625), platforms=program.platforms)
  return {name: without_locations(text) for name, text in found.items()}


def without_locations(text: str) -> str:
  text = re.sub(r"^#loc.*\n?", "", text, flags=re.MULTILINE)
  return re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)


if __name__ == "__main__":
  json.dump(texts(), sys.stdout)
