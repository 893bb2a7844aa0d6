"""What the tests of jax_cond_patch share."""
from __future__ import annotations

from collections.abc import Callable, Container, Sequence
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any
import unittest

import jax
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax._src import xla_bridge
from jax._src.interpreters import batching as batching_internals
from jax._src.interpreters import mlir as mlir_internals
# Its import defines flags, and JAX's test cases refuse that within a test.
import jax.experimental.pallas.tpu  # noqa: F401
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp
import numpy as np

try:
  from jax.experimental.compute_on import compute_on
except ImportError:
  compute_on = None
try:
  from jax import export as _export
except ImportError:  # up to JAX 0.4.29
  from jax.experimental import export as _export  # type: ignore[no-redef]
  if not hasattr(_export, "export") or not callable(_export.export):
    from jax.experimental.export import export as _export  # up to JAX 0.4.23

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch.compat import internals
from jax_cond_patch.compat import releases

PLATFORMS = internals.PLATFORMS

# A third of the time of the tests of errors goes to the search for JAX's own
# files in their tracebacks.
jax.config.update("jax_traceback_filtering", "off")

# An export has ordered effects from this version of its format on, which JAX
# 0.4.21 to 0.4.23 have, too, but do not take by themselves.
if getattr(jax.config, "jax_serialization_version", None) == 8:
  jax.config.update("jax_serialization_version", 9)

EXPORT_MODULE = _export.__name__


def _has_module(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ImportError:  # of what it is in
    return False


def _has(module: str, name: str) -> bool:
  return _has_module(module) and hasattr(importlib.import_module(module), name)


def _rooflines() -> Container[core.Primitive]:
  name = "jax.experimental.roofline.roofline"
  return importlib.import_module(name)._rooflines if _has_module(name) else ()


def _lowers_to_triton() -> bool:
  name = "jax._src.pallas.triton.pallas_call_registration"
  if not _has_module(name):
    return False
  text = pathlib.Path(importlib.util.find_spec(name).origin).read_text()
  return not ("get_compute_capability" in text or "local_devices" in text)


# What some of the supported releases do not have, and why it is not tested
# there. All tests that are skipped for the release are skipped by this.
_FEATURES = dict(
    compute_on=(
        hasattr(mlir_internals.LoweringRuleContext, "jaxpr_eqn_ctx"),
        "compute_on changes no platform up to JAX 0.4.30."),
    checked_shard_map=(
        hasattr(batching_internals, "fancy_primitive_batchers"),
        "Up to JAX 0.4.35 shard_map checks no conditional of any kind."),
    vmap_of_checked_psum=(
        not (0, 8, 1) <= jax.__version_info__ < (0, 9, 0),
        "JAX 0.8.1 to 0.8.3 has no vmap of a psum in a checked shard_map."),
    checked_derivative_of_closed_call=(
        not (0, 8, 0) <= jax.__version_info__ < (0, 8, 2),
        "In JAX 0.8.0 and 0.8.1 its own checks refuse the derivative of any "
        "closed call."),
    serialization=(
        hasattr(_export, "deserialize"),
        "Exported functions are not serialized up to JAX 0.4.23."),
    modules_of_older_jax=(
        jax.__version_info__ >= (0, 4, 30),
        "The modules that are kept for this are of JAX 0.4.30 and later."),
    set_xla_metadata=(
        _has_module("jax.experimental.xla_metadata"),
        "There is no set_xla_metadata up to JAX 0.4.31."),
    diffs=(
        activation.has_patches(),
        "The installed JAX is one that was released, without diffs."),
    package=(
        not activation.has_patches(),
        "With the diffs JAX does not do this; see docs/pages/patches.md."),
    freed_traces=(
        internals.has_gil,
        "In free-threaded Python JAX keeps some objects of each trace."),
    switch_that_waits=(
        internals.has_gil,
        "In free-threaded Python a switch does not wait for other threads."),
    newest_release=(
        releases.installed() == releases.RELEASES[-1].jax,
        "What is replaced and called is recorded for the newest release."),
    tpu_kernels=(
        hasattr(mlir_internals.LoweringRuleContext, "platforms"),
        "Up to JAX 0.4.29 a Pallas kernel for TPU is lowered where there is a "
        "TPU only."),
    triton_kernels=(
        _lowers_to_triton(),
        "Up to JAX 0.4.25 other libraries lower Pallas kernels to Triton, and "
        "up to 0.4.29 JAX does it for a GPU that is there."),
    interpreted_kernels_for_several_platforms=(
        _has_module("jax._src.pallas.triton.pallas_call_registration"),
        "Up to JAX 0.4.25 no Pallas kernel is in a module for several "
        "platforms."),
    checked_derivatives_of_kernels=(
        jax.__version_info__ >= (0, 4, 29),
        "Up to JAX 0.4.28 its own checks refuse the derivative of any kernel."),
    mosaic_gpu_kernels=(
        _has_module("jax.experimental.pallas.mosaic_gpu") and
        jax.__version_info__ != (0, 5, 0),
        "Up to JAX 0.4.34 Pallas has no Mosaic GPU but by a hidden flag, and "
        "the jaxlib of 0.5.0 for the CPU does not have its passes."),
    mosaic_gpu_conditionals_of_arrays=(
        jax.__version_info__ >= (0, 4, 36),
        "Up to JAX 0.4.35 no conditional of any kind in a Mosaic GPU kernel "
        "returns an array."),
    tpu_interpreter=(
        _has_module("jax._src.pallas.mosaic.interpret"),
        "There is no interpreter of TPU kernels up to JAX 0.5.0."),
    gpu_interpreter=(
        _has("jax.experimental.pallas.mosaic_gpu", "InterpretGPUParams"),
        "There is no interpreter of Mosaic GPU kernels up to JAX 0.8."),
    compute_on2=(
        _has("jax._src.compute_on", "compute_on2") and
        jax.__version_info__ >= (0, 10, 1),
        "Only JAX 0.10.1 to 0.11.0 have a second `compute_on` that changes the "
        "platform."),
    remat_by_tracing=(
        hasattr(config, "remat3"),
        "Up to JAX 0.10.1 nothing in JAX chooses remat by tracing, which is "
        "not finished."),
    refs=(
        jax.__version_info__ >= (0, 5, 0),
        "Up to JAX 0.4.38 no `scan` takes a reference that run_state did not "
        "make."),
    exported_refs=(
        jax.__version_info__ >= (0, 4, 34),
        "Up to JAX 0.4.33 no export has references."),
    megablox=(
        _has_module("jax.experimental.pallas.ops.tpu.megablox"),
        "There is no megablox up to JAX 0.4.25."),
    platform_dependent_diagonal=(
        "platform_dependent" in inspect.getsource(jnp.diagonal),
        "JAX's diagonal is the same on each platform."),
    freed_constants=(
        jax.__version_info__ >= (0, 4, 31),
        "Up to JAX 0.4.30 it keeps for itself what branches close over."),
    persistent_cache_on_cpu=(
        jax.__version_info__ >= (0, 4, 28),
        "Up to JAX 0.4.27 the persistent cache is not for the CPU."),
    cpu_collectives=(
        "gloo" in inspect.getsource(xla_bridge),
        "Up to JAX 0.4.24 CPUs of several processes do not work together."),
    backend_of_debug_callbacks=(
        hasattr(mlir_internals.ModuleContext, "get_backend"),
        "Up to JAX 0.4.38 the lowering rule of each platform lowers debugging "
        "callbacks whether or not there is such a backend."),
    key_reuse=(
        hasattr(jax, "debug_key_reuse"),
        "Up to JAX 0.4.25 no reuse of keys is found."),
    fusible=(
        _has_module("jax._src.pallas.fuser.fusible_dtype") or
        _has_module("jax._src.pallas.fuser.fusable_dtype"),
        "Up to JAX 0.5.2 there are no fusible types."),
    direct_linearize=(
        jax.__version_info__ >= (0, 5, 0),
        "Up to JAX 0.4.38 only one way to linearize is finished."),
    direct_linearize_of_shard_map=(
        jax.__version_info__ >= (0, 5, 3),
        "Up to JAX 0.5.2 there is one way to linearize a shard_map."),
    high_types=(
        _has("jax._src.hijax", "new_box") and
        jax.__version_info__ >= (0, 7, 2),
        "This JAX has no `new_box`, or, 0.7.1, none in a conditional."),
    optional_varying_axes=(
        hasattr(config, "varying_axes_in_types"),
        "Only JAX 0.5.3 and 0.6.0 have a flag for the axes that values "
        "vary on."),
    roofline_of_conditionals=(
        internals.cond_p in _rooflines(),
        "Up to JAX 0.6.2 no conditional has a roofline."),
)


def has(feature: str) -> bool:
  """Whether JAX has something that only a part of a test is about."""
  return _FEATURES[feature][0]


def requires(feature: str) -> Callable:
  """Skips a test where JAX does not have what it is about."""
  return unittest.skipUnless(*_FEATURES[feature])


def doubling_primitive(name: str) -> core.Primitive:
  """A primitive that doubles, without a rule but to be lowered."""
  primitive = core.Primitive(name)
  primitive.def_abstract_eval(lambda x: x)
  mlir.register_lowering(
      primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
  return primitive


def only_on_primitive(platform: str) -> core.Primitive:
  """A primitive that adds 1, and raises when lowered for another platform."""
  primitive = core.Primitive(f"only_on_{platform}")
  primitive.def_abstract_eval(lambda x: x)
  mlir.register_lowering(
      primitive, mlir.lower_fun(lambda x: x + 1, multiple_results=False),
      platform=platform)
  ad.defjvp(primitive, lambda g, x: g)
  batching.defvectorized(primitive)
  return primitive


_only_on = {p: only_on_primitive(p) for p in ("cpu", "cuda", "rocm", "tpu")}


def only_on(platform: str) -> Callable:
  """Returns `lambda x: x + 1` that can be lowered for one platform only."""
  return _only_on[platform].bind


def on_host(f: Callable) -> Callable:
  """A function that is lowered for the CPU, in a `compute_on` region."""
  return host_region(jax.jit(f))


def host_region(f: Callable) -> Callable:
  """A `compute_on` region, without a jitted function in it."""
  try:
    return compute_on("device_host")(f)
  except TypeError:  # JAX 0.11.1 and later
    return compute_on(f, compute_type="device_host",
                      out_memory_spaces=jax.memory.Space.Device)


def shard_map(f: Callable, *, check: bool, **kwargs) -> Callable:
  """`jax.shard_map`, where it is in each JAX."""
  if hasattr(jax, "shard_map"):
    return jax.shard_map(f, check_vma=check, **kwargs)
  from jax.experimental.shard_map import shard_map as experimental
  return experimental(f, check_rep=check, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Exported:
  """An `Exported` of JAX 0.4.29 and earlier, with the names of later ones."""
  exported: Any

  @property
  def platforms(self) -> tuple[str, ...]:
    return self.exported.lowering_platforms

  def __getattr__(self, name):
    return getattr(self.exported, name)

  def mlir_module(self) -> str:
    return str(self.exported.mlir_module())

  def call(self, *args):
    return _export.call_exported(self.exported)(*args)

  def vjp(self) -> _Exported:
    return _Exported(self.exported.vjp())

  def replace(self, platforms: tuple[str, ...]) -> _Exported:
    return _Exported(dataclasses.replace(
        self.exported, lowering_platforms=platforms))


def export(f: Callable, *, platforms: Sequence[str] | None = None, **kwargs
           ) -> Callable:
  """`jax.export.export` of a jitted function, where it is in each JAX."""
  platforms = platforms and tuple(platforms)
  if hasattr(_export, "call_exported"):
    exporter = _export.export(f, lowering_platforms=platforms, **kwargs)
    return lambda *args: _Exported(exporter(*args))
  return _export.export(f, platforms=platforms, **kwargs)


def deserialize(serialized: bytearray):
  """Reads an export from the bytes of a file."""
  return _export.deserialize(serialized)


def reloaded(exported, vjp_order: int = 0):
  """What is read from a file that an export is written to."""
  if hasattr(exported, "serialize"):
    return deserialize(exported.serialize(vjp_order=vjp_order))
  if hasattr(_export, "serialize"):
    return _Exported(deserialize(
        _export.serialize(exported.exported, vjp_order=vjp_order)))
  return exported  # There are no files of exports up to JAX 0.4.23.


symbolic_shape = _export.symbolic_shape
DisabledSafetyCheck = _export.DisabledSafetyCheck


def lower_jitted(f: Callable, *args, platforms: Sequence[str]):
  """What `jax.jit(f).lower` gives for other platforms."""
  platforms = tuple(platforms)
  if hasattr(f, "trace"):
    traced = f.trace(*args)
    # It came with JAX 0.4.30, one release after `trace`.
    if "lowering_platforms" in inspect.signature(traced.lower).parameters:
      return traced.lower(lowering_platforms=platforms)
  return f.lower(*args, _experimental_lowering_parameters=(
      mlir_internals.LoweringParameters(platforms=platforms)))


def lower(f: Callable, *args, platforms: Sequence[str]) -> str:
  """The StableHLO text of a jitted function for some platforms."""
  if len(platforms) > 1:
    return export(jax.jit(f), platforms=platforms)(*args).mlir_module()
  return lower_jitted(jax.jit(f), *args, platforms=platforms).as_text()


def count_ops(text: str, op: str) -> int:
  """How often an operation stands in StableHLO text, in any of its forms."""
  return len(re.findall(rf'[^\w.]"?{re.escape(op)}"?[^\w.]', text))


def count_eqns(jaxpr, primitive_name: str) -> int:
  """How often a primitive stands in a jaxpr, at any depth."""
  jaxpr = internals.open_jaxpr(jaxpr)
  return sum((eqn.primitive.name == primitive_name) + sum(
      count_eqns(j, primitive_name) for j in core.jaxprs_in_params(eqn.params))
             for eqn in jaxpr.eqns)


def find_eqns(jaxpr, primitive_name: str) -> list[core.JaxprEqn]:
  """The equations of a primitive in a jaxpr, at any depth."""
  found = []
  for eqn in internals.open_jaxpr(jaxpr).eqns:
    if eqn.primitive.name == primitive_name:
      found.append(eqn)
    for inner in core.jaxprs_in_params(eqn.params):
      found.extend(find_eqns(inner, primitive_name))
  return found


def run_as(exported, platform: str, *args):
  """Runs one platform's part of a module for several, on this machine's.

  The module's platforms get other names: this machine's where `platform` stood.
  """
  here = jax.default_backend()
  here = "cuda" if here == "gpu" else here
  names = tuple(here if p == platform else "other" if p == here else p
                for p in exported.platforms)
  replace = getattr(exported, "replace", None) or functools.partial(
      dataclasses.replace, exported)
  return replace(platforms=names).call(*args)


def run_python(code: str, **env) -> subprocess.CompletedProcess:
  """Runs a program in a fresh interpreter."""
  return subprocess.run(
      [sys.executable, "-c", textwrap.dedent(code)], text=True,
      capture_output=True, env={**os.environ, **env}, check=False)


def python_path() -> str:
  """The `PYTHONPATH` of a fresh interpreter that finds what the tests find."""
  return os.pathsep.join(filter(None, sys.path))


class JcpTestCase(jtu.JaxTestCase):
  """A test case with checks on modules."""

  def requires(self, feature: str) -> None:
    """As the decorator `requires`, for one case of a test."""
    has, reason = _FEATURES[feature]
    if not has:
      self.skipTest(reason)

  def assertSameModule(self, f, direct, *args, platform="cpu"):
    """The module of `f` is that of `direct`, character for character."""
    def named(fun):
      def fun_(*args):
        return fun(*args)
      return fun_
    expected = lower(named(direct), *args, platforms=(platform,))
    self.assertMultiLineEqual(
        lower(named(f), *args, platforms=(platform,)), expected)

  def assertSameModuleAsWithout(self, f, *args, platforms):
    """The module of `f` is that of JAX without the package."""
    texts = []
    # In a loop, since the lines that call are in the text of an export.
    for context in (jax_cond_patch.activated, jax_cond_patch.deactivated):
      with context():
        texts.append(lower(lambda *args: f(*args), *args, platforms=platforms))
    self.assertMultiLineEqual(*texts)

  def assertRunsAs(self, f, expected: dict[str, Callable], *args,
                   platforms=None, rtol=1e-6):
    """In a module for several platforms, each computes what is expected."""
    exported = export(
        jax.jit(f), platforms=platforms or tuple(expected))(*args)
    for platform, fun in expected.items():
      np.testing.assert_allclose(
          run_as(exported, platform, *args), fun(*args), rtol=rtol,
          err_msg=f"{platform} of {exported.platforms}")
    return exported


def marked(value: float) -> Callable:
  """Returns a branch with a constant of its own, to be found in a module."""
  return lambda x: jnp.sin(x) * np.float32(value)
