"""Random programs for several platforms, run by JAX and by plain Python.

A program is a tree of nodes. `build` makes a JAX function of a node, and
`evaluate` says in plain Python what it computes on one platform. All functions
are of one number, so that a derivative is a dual number.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax._src import core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
import jcp_test_util as tu

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
THRESHOLD = .3


# Plain Python: numbers and dual numbers.

@dataclasses.dataclass(frozen=True)
class Dual:
  """A number and its derivative, which may be dual numbers themselves."""
  value: Any
  slope: Any

  def __add__(self, other):
    other = _as_dual(other)
    return Dual(self.value + other.value, self.slope + other.slope)

  def __mul__(self, other):
    other = _as_dual(other)
    return Dual(self.value * other.value,
                self.value * other.slope + self.slope * other.value)

  __radd__ = __add__
  __rmul__ = __mul__


def _as_dual(x) -> Dual:
  return x if isinstance(x, Dual) else Dual(x, 0.)


def _primal(x) -> float:
  return _primal(x.value) if isinstance(x, Dual) else x


def _sin(x):
  return (Dual(_sin(x.value), _cos(x.value) * x.slope)
          if isinstance(x, Dual) else math.sin(x))


def _cos(x):
  return (Dual(_cos(x.value), -1. * _sin(x.value) * x.slope)
          if isinstance(x, Dual) else math.cos(x))


def _slope(fun: Callable, x):
  y = fun(Dual(x, 1.))
  return y.slope if isinstance(y, Dual) else 0.


class TooClose(Exception):
  """A predicate that rounding decides."""


# The nodes. `run` is for plain Python.

@dataclasses.dataclass(frozen=True)
class Node:
  """A function of one number.

  Subclasses have nodes, and tuples of nodes, as fields.
  """

  def build(self, program: Program) -> Callable:
    """Makes a JAX function."""
    raise NotImplementedError

  def run(self, x, platform: str, program: Program):
    """Says what it computes on a platform."""
    raise NotImplementedError

  def chosen(self, platform: str) -> Iterable[tuple[Node, str]]:
    """What a platform reaches from here, and for which platform that is."""
    return ((node, platform) for node in self.children())

  def children(self) -> tuple[Node, ...]:
    fields = (getattr(self, f.name) for f in dataclasses.fields(self))
    return tuple(
        node for x in fields for node in (x if isinstance(x, tuple) else (x,))
        if isinstance(node, Node))


@dataclasses.dataclass(frozen=True)
class Leaf(Node):
  """Has a constant of its own."""
  number: int

  @property
  def constant(self) -> float:
    return .4 + round(4096 * (self.number * .6180339887 % 1) * .8) / 4096

  def build(self, program):
    if self.number % 2:
      return lambda x: jnp.sin(x) * self.constant + self.constant
    # With an array too, which is not a literal of the jaxpr.
    array = np.full(4, self.constant / 4, np.float32)
    return lambda x: jnp.sin(x) * self.constant + jnp.sum(array)

  def run(self, x, platform, program):
    return _sin(x) * self.constant + self.constant


@dataclasses.dataclass(frozen=True)
class OnlyOn(Node):
  """A primitive that cannot be lowered for another platform."""
  platform: str

  def build(self, program):
    return tu.only_on(self.platform)

  def run(self, x, platform, program):
    assert platform == self.platform, (platform, self)
    return x + 1.


@dataclasses.dataclass(frozen=True)
class Helper(Node):
  """A jitted function of the program, the same wherever it is called."""
  number: int

  def build(self, program):
    return program.jitted(self.number)

  def run(self, x, platform, program):
    return program.helpers[self.number].run(x, platform, program)


@dataclasses.dataclass(frozen=True)
class Sequence(Node):
  """One after the other."""
  first: Node
  second: Node

  def build(self, program):
    first, second = self.first.build(program), self.second.build(program)
    return lambda x: second(first(x))

  def run(self, x, platform, program):
    return self.second.run(
        self.first.run(x, platform, program), platform, program)


@dataclasses.dataclass(frozen=True)
class _PerPlatform(Node):
  """Branches, the branch of each platform by its position, and a default."""
  branches: tuple[Node, ...]
  platforms: tuple[tuple[str, int], ...]
  default: Node | None

  def functions(self, program) -> tuple[dict[str, Callable], Callable | None]:
    branches = [branch.build(program) for branch in self.branches]
    return ({platform: branches[i] for platform, i in self.platforms},
            self.default and self.default.build(program))

  def on(self, platform: str) -> Node:
    i = dict(self.platforms).get(platform)
    branch = self.default if i is None else self.branches[i]
    assert branch is not None, (platform, self)
    return branch

  def chosen(self, platform):
    return ((self.on(platform), platform),)

  def run(self, x, platform, program):
    return self.on(platform).run(x, platform, program)


@dataclasses.dataclass(frozen=True)
class PlatformDependent(_PerPlatform):
  """A platform conditional."""

  def build(self, program):
    functions, default = self.functions(program)
    return lambda x: lax.platform_dependent(x, **functions, default=default)


@dataclasses.dataclass(frozen=True)
class UserPrimitive(_PerPlatform):
  """A primitive with lowering rules for some platforms."""

  def build(self, program):
    functions = Functions(*self.functions(program))
    primitive = user_primitive(frozenset(functions.on), bool(self.default))
    return lambda x: primitive.bind(x, functions=functions)


@dataclasses.dataclass(frozen=True)
class Wrapped(Node):
  """A node in a loop or a transformation of JAX."""
  kind: str
  node: Node

  def build(self, program):
    return _WRAPS[self.kind](self.node.build(program))

  def platform(self, platform: str) -> str:
    return "cpu" if self.kind == "on_host" else platform

  def chosen(self, platform):
    return ((self.node, self.platform(platform)),)

  def run(self, x, platform, program):
    platform = self.platform(platform)
    node = lambda x: self.node.run(x, platform, program)
    if self.kind in ("fori", "while"):
      return node(node(x))
    if self.kind == "scan":
      once = node(x)
      return node(once) + once
    if self.kind == "vmap":
      return node(x) + node(-.5 * x)
    if self.kind in ("grad", "jvp"):
      return _slope(node, x)
    return node(x)


def _scan(f):
  def step(carry, _):
    y = f(carry)
    return y, y
  def scanned(x):
    last, ys = lax.scan(step, x, None, length=2)
    return last + ys[0]
  return scanned


def _derivative(f):
  """The derivative of each element, in reverse mode."""
  return jax.grad(lambda x: f(x).sum())


def _custom_jvp(f):
  f = jax.custom_jvp(f)
  f.defjvp(lambda primals, tangents: (
      f(*primals), _derivative(f.fun)(*primals) * tangents[0]))
  return f


def _custom_vjp(f):
  f = jax.custom_vjp(f)
  f.defvjp(lambda x: (f(x), x), lambda x, ct: (_derivative(f.fun)(x) * ct,))
  return f


_WRAPS: dict[str, Callable] = {
    "scan": _scan,
    "fori": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "while": lambda f: lambda x: lax.while_loop(
        lambda c: (c[0] < 2) & (f(c[1]) < 1e30),
        lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x * -.5])).sum(0),
    "grad": _derivative,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}
if tu.has("compute_on"):
  _WRAPS["on_host"] = tu.on_host

# What cannot be in some kinds of nodes. JAX has no reverse mode of `while`, and
# the derivatives in `jvp` would be in reverse mode here. JAX 0.11.1 and later
# refuse regions in regions.
_FORBIDS = {
    "grad": frozenset(["while"]),
    "jvp": frozenset(["custom_jvp", "custom_vjp", "user_primitive"]),
    "on_host": frozenset(["on_host"]),
}


@dataclasses.dataclass(frozen=True)
class Cond(Node):
  """An ordinary conditional."""
  below: Node
  above: Node

  def build(self, program):
    below, above = self.below.build(program), self.above.build(program)
    return lambda x: lax.cond(x > THRESHOLD, above, below, x)

  def run(self, x, platform, program):
    if abs(_primal(x) - THRESHOLD) < 1e-3:
      raise TooClose
    # Both, since a branch that is not taken must be right to be lowered.
    below, above = (
        n.run(x, platform, program) for n in (self.below, self.above))
    return above if _primal(x) > THRESHOLD else below


# User primitives.

class Functions:
  """A param of a primitive: what it computes on each platform."""

  def __init__(self, on: dict[str, Callable], default: Callable | None):
    self.on = on
    self.default = default

  def _map(self, transform: Callable) -> Functions:
    # A function that is shared stays so.
    transform = functools.cache(transform)
    return Functions({p: transform(f) for p, f in self.on.items()},
                     self.default and transform(self.default))

  @functools.cached_property
  def derivative(self) -> Functions:
    return self._map(_derivative)

  @functools.cached_property
  def batched(self) -> Functions:
    return self._map(jax.vmap)


@functools.cache
def user_primitive(platforms: frozenset[str], has_default: bool):
  """A primitive with lowering rules by `mlir.lower_fun` for these platforms."""
  primitive = core.Primitive("_".join(
      ["user", *sorted(platforms), *["default"] * has_default]))
  primitive.def_abstract_eval(lambda x, functions: x)
  for platform in platforms:
    mlir.register_lowering(primitive, mlir.lower_fun(
        lambda x, functions, platform=platform: functions.on[platform](x),
        multiple_results=False), platform=platform)
  if has_default:
    mlir.register_lowering(primitive, mlir.lower_fun(
        lambda x, functions: functions.default(x), multiple_results=False))

  def jvp(primals, tangents, functions):
    (x,), (t,) = primals, tangents
    return (primitive.bind(x, functions=functions),
            primitive.bind(x, functions=functions.derivative) * t)
  ad.primitive_jvps[primitive] = jvp

  def batch(args, dims, functions):
    x = jnp.moveaxis(args[0], dims[0], 0)
    return primitive.bind(x, functions=functions.batched), 0
  batching.primitive_batchers[primitive] = batch
  return primitive


# Programs.

@dataclasses.dataclass
class Program:
  """A node, the helpers that it and its functions call, and platforms.

  Attributes:
    helpers: their bodies, which call only helpers before them.
    body: the program.
    platforms: the lowering platforms.
    pin: the platforms that are promised, if it is traced under a pin.
  """
  helpers: tuple[Node, ...]
  body: Node
  platforms: tuple[str, ...]
  pin: tuple[str, ...] | None

  @functools.cached_property
  def _jitted(self) -> dict[int, Callable]:
    return {}

  def jitted(self, number: int) -> Callable:
    if number not in self._jitted:
      self._jitted[number] = jax.jit(self.helpers[number].build(self))
    return self._jitted[number]

  def function(self) -> Callable:
    self._jitted.clear()
    return self.body.build(self)

  def run(self, x: float, platform: str) -> float:
    return self.body.run(x, platform, self)

  def unreachable_constants(self) -> set[float]:
    """The constants that no lowering platform reaches."""
    reached: set[tuple[Node, str]] = set()
    queue = [(self.body, platform) for platform in self.platforms]
    while queue:
      node, platform = queue.pop()
      if (node, platform) not in reached:
        reached.add((node, platform))
        queue.extend([(self.helpers[node.number], platform)]
                     if isinstance(node, Helper) else node.chosen(platform))
    leaves, nodes = set(), [self.body, *self.helpers]
    while nodes:
      node = nodes.pop()
      nodes.extend(node.children())
      if isinstance(node, Leaf):
        leaves.add(node)
    return {leaf.constant for leaf in leaves - {node for node, _ in reached}}


class _Helper(NamedTuple):
  """What a helper needs.

  Attributes:
    reach: the platforms that it can be called on.
    kinds: the kinds of nodes in it.
  """
  reach: frozenset[str]
  kinds: frozenset[str]


class _Generator:
  """Draws a program. `reach` are the platforms that reach a node."""

  def __init__(self, draw: Callable):
    self.draw = draw
    self.leaves = 0
    self.helpers: list[_Helper] = []
    self.forbidden: frozenset[str] = frozenset()
    self.kinds: set[str] = set()

  def program(self) -> Program:
    order = tuple(self.draw(st.permutations(PLATFORMS)))
    platforms = order[:self.draw(st.sampled_from((1, 2, 3, 3, 4)))]
    helpers = []
    for _ in range(self.draw(st.integers(0, 2))):
      reach = frozenset(self.draw(st.sampled_from((platforms, PLATFORMS))))
      self.forbidden = self.draw(st.sampled_from(
          (*_FORBIDS.values(), frozenset())))
      helpers.append(self.node(reach, 2))
      self.helpers.append(_Helper(reach, frozenset(self.kinds)))
      self.kinds.clear()
    self.forbidden = frozenset()
    body = self.node(frozenset(platforms), 4)
    # Regions on the host are lowered for the CPU, and it is what runs here.
    pin = self.draw(st.sampled_from(
        (None, tuple(p for p in order if p in (*platforms, "cpu")), order)))
    return Program(tuple(helpers), body, platforms, pin)

  def leaf(self, reach: frozenset[str]) -> Node:
    self.leaves += 1
    leaves = [Leaf(self.leaves)]
    leaves += [OnlyOn(p) for p in PLATFORMS if reach <= {p}]
    leaves += [Helper(i) for i, helper in enumerate(self.helpers)
               if reach <= helper.reach and not helper.kinds & self.forbidden]
    leaf = self.draw(st.sampled_from(leaves[::-1]))
    if isinstance(leaf, Helper):
      self.kinds |= self.helpers[leaf.number].kinds
    return leaf

  def node(self, reach: frozenset[str], depth: int) -> Node:
    if not reach:
      depth = min(depth, 1)
    if depth == 0:
      return self.leaf(reach)
    depth -= 1
    kinds = ("leaf", "sequence", "cond", "user_primitive", "user_primitive",
             *["platform_dependent"] * 4, *_WRAPS)
    kind = self.draw(st.sampled_from(
        [kind for kind in kinds if kind not in self.forbidden]))
    self.kinds.add(kind)
    if kind == "leaf":
      return self.leaf(reach)
    if kind == "sequence":
      return Sequence(self.node(reach, depth), self.node(reach, depth))
    if kind == "cond":
      return Cond(self.node(reach, depth), self.node(reach, depth))
    if kind == "platform_dependent":
      return PlatformDependent(*self.per_platform(reach, depth))
    if kind == "user_primitive":
      return UserPrimitive(*self.per_platform(reach, depth))
    forbidden = self.forbidden
    self.forbidden |= _FORBIDS.get(kind, frozenset())
    if kind == "on_host" and reach:
      reach = frozenset(["cpu"])
    node = Wrapped(kind, self.node(reach, depth))
    self.forbidden = forbidden
    return node

  def per_platform(self, reach: frozenset[str], depth: int):
    order = self.draw(st.permutations(PLATFORMS))
    names = order[:self.draw(st.integers(1, 4))]
    owned: list[list[str]] = []
    for name in names:
      i = self.draw(st.integers(0, len(owned)))
      if i == len(owned):
        owned.append([])
      owned[i].append(name)
    branches = tuple(self.node(reach.intersection(o), depth) for o in owned)
    default = None
    if not reach <= set(names) or self.draw(st.booleans()):
      default = self.node(reach.difference(names), depth)
    platforms = tuple((n, i) for n in names for i, o in enumerate(owned)
                      if n in o)
    return branches, platforms, default


@st.composite
def programs(draw) -> Program:
  return _Generator(draw).program()


def constants_in(module: str) -> set[float]:
  """The floating-point constants in StableHLO text."""
  return {float(c) for c in re.findall(
      r"dense<(-?[0-9.]+[eE]?[-+]?[0-9]*)> : tensor<[0-9x]*f32>", module)}


# What JAX makes of a program.

X = .625
# A program runs once.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0,
                     "xla_llvm_disable_expensive_passes": True}


def expected(program: Program) -> dict[str, float]:
  """What each platform computes, in plain Python."""
  return {p: float(program.run(X, p)) for p in program.platforms}


class WrongNumber(AssertionError):
  """A platform computes something else."""


class UnreachableCode(AssertionError):
  """A module has something of a branch that is not reached."""


def check(program: Program, expected: dict[str, float]) -> None:
  """Raises an `AssertionError` if a module is not right.

  Args:
    program: the program.
    expected: what each platform computes.
  """
  jax_cond_patch.pin(program.pin)
  x = np.float32(X)
  exported = tu.export(
      jax.jit(program.function()), platforms=program.platforms)(x)
  # All in one program, since compilation takes most of the time.
  computed = jax.jit(lambda x: {
      p: tu.run_as(exported, p, x) for p in program.platforms}).lower(
          x).compile(_COMPILER_OPTIONS)(x)
  for platform, value in expected.items():
    if not np.allclose(computed[platform], value, rtol=1e-4, atol=1e-4):
      raise WrongNumber(
          f"{platform} computes {computed[platform]}, not {value}: {program}")
  if unreachable := program.unreachable_constants():
    module = exported.mlir_module()
    found = constants_in(module) & {
        float(np.float32(c * f)) for c in unreachable for f in (1, 1 / 4)}
    if found:
      raise UnreachableCode(f"{found} in the module of {program}:\n{module}")
  again = tu.reloaded(exported)
  assert again.mlir_module_serialized == exported.mlir_module_serialized, (
      f"serialization changes {program}")
  assert again.platforms == exported.platforms, program


def sampling(examples: int, seed: int) -> Callable:
  """Decorates a function of a program: a call runs it on random ones."""
  def decorator(fun):
    given = hypothesis.given(programs())(fun)
    return hypothesis.seed(seed)(hypothesis.settings(
        max_examples=examples, deadline=None, database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck))(given))
  return decorator
