"""A promise to lower for some platforms only, and the mark of who relies on it.

Under a pin `platform_dependent` traces only what the pinned platforms own. To
the program that it is part of it adds an equation, `pinned`, which says so. It
is taken out before lowering, if the lowering platforms are among the pinned,
and is an error if they are not. It has an effect, so that it stays where its
program stays, through every transformation.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import re

from jax._src import core
from jax._src import dispatch
from jax._src import effects
from jax._src.lib.mlir import ir

from jax_cond_patch import activation
from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals

CALL_EXPORTED = "call_exported"


@dataclasses.dataclass(frozen=True)
class PinnedEffect(effects.Effect):
  """That a program was traced for some platforms only."""
  platforms: tuple[str, ...]

  def __str__(self) -> str:
    return f"Pinned<{','.join(self.platforms)}>"


pinned_p = core.Primitive("pinned")
pinned_p.multiple_results = True
pinned_p.def_impl(lambda **params: dispatch.apply_primitive(pinned_p, **params))


@pinned_p.def_effectful_abstract_eval
def _pinned_abstract_eval(*, platforms):
  return [], {PinnedEffect(platforms)}


def pinned_transpose(cts, **params):
  """It has no inputs to give cotangents to."""
  del cts, params
  return []


# The places where JAX lists the effects that it lets through.
ALLOWED_EFFECTS = ("lowerable_effects", "control_flow_allowed_effects",
                   "custom_derivatives_allowed_effects",
                   "remat_allowed_effects")


def check(pin: tuple[str, ...], platforms: Sequence, source_info) -> None:
  """Raises an error if a `pinned` equation is lowered for other platforms.

  Args:
    pin: the platforms of the equation.
    platforms: the lowering platforms.
    source_info: where it was traced.
  """
  location = internals.user_location(source_info)
  _check(pin, platforms, "program was traced",
         f"the platform_dependent at {location}", "trace the program")


def _check(pin: tuple[str, ...], platforms: Sequence, what: str, where: str,
           remedy: str) -> None:
  broken = [p for p in platforms if p not in pin]
  if broken:
    raise NotImplementedError(
        f"This {what} under the pin {platforms_lib.quote(pin)}, which promises "
        "to lower for nothing else, and is lowered for "
        f"{platforms_lib.quote(broken)}. Code for other platforms was left out "
        f"of {where}. Pin to these platforms too, by jax_cond_patch.pin, or to "
        f"none, and {remedy} anew. See docs/pages/errors.md#pin.")


# A module that is exported under a pin says so, in the name of an attribute.

_MARK = "jax_cond_patch.pinned_to."


def module_to_bytecode(original: Callable) -> Callable:
  """For the function that serializes a module, at the end of an export."""
  def marking_module_to_bytecode(module, *args, **kwargs):
    pin = activation.pinned()
    if pin is not None:
      with module.context:
        module.operation.attributes[_MARK + ".".join(pin)] = (
            ir.BoolAttr.get(True))
    return original(module, *args, **kwargs)

  return marking_module_to_bytecode


def _pin_of(exported) -> tuple[str, ...] | None:
  found = re.search(re.escape(_MARK).encode() + rb"([\w.]+)",
                    exported.mlir_module_serialized)
  return tuple(found[1].decode().split(".")) if found else None


def is_pinned_export(eqn: core.JaxprEqn) -> bool:
  """Whether an equation calls a function that was exported under a pin."""
  return (eqn.primitive.name == CALL_EXPORTED and
          _pin_of(eqn.params["exported"]) is not None)


def check_export(eqn: core.JaxprEqn, platforms: Sequence) -> None:
  """Raises an error if a pinned export is called on other platforms."""
  exported = eqn.params["exported"]
  pin = _pin_of(exported)
  if pin is not None:
    _check(pin, platforms, f"function, {exported.fun_name}, was exported", "it",
           "export it")
