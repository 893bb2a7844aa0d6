"""A promise to lower for some platforms only, and the mark of who relies on it.

Under a pin `platform_dependent` traces only what the pinned platforms own. To
the program that it is part of it adds an equation, `pinned`, which says so. It
is taken out before lowering, if the lowering platforms are among the pinned,
and is an error if they are not. It has an effect, so that it stays where its
program stays, through every transformation.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from jax._src import core
from jax._src import dispatch
from jax._src import effects

from jax_cond_patch import platforms as platforms_lib
from jax_cond_patch.compat import internals


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


def check(pin: Sequence[str], platforms: Sequence, source_info) -> None:
  """Raises an error if a `pinned` equation is lowered for other platforms.

  Args:
    pin: the platforms of the equation.
    platforms: the lowering platforms.
    source_info: where it was traced.
  """
  broken = [p for p in platforms if p not in pin]
  if broken:
    raise NotImplementedError(
        "This program was traced under the pin "
        f"{platforms_lib.quote(pin)}, which promises to lower for nothing "
        f"else, and is lowered for {platforms_lib.quote(broken)}. Code for "
        "other platforms was left out of the platform_dependent at "
        f"{internals.user_location(source_info)}. Pin to these platforms "
        "too, by jax_cond_patch.pin, or to none, and trace the program anew. "
        "See docs/pages/errors.md#pin.")
