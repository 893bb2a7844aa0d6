"""Platform conditionals that lower only what can be reached.

`import jax_cond_patch` patches the JAX that runs, so that code for a platform
that a program is not lowered for cannot break it, change it or slow it down.
"""
from typing import TYPE_CHECKING as _TYPE_CHECKING

from jax_cond_patch.activation import Status as Status
from jax_cond_patch.activation import activate as activate
from jax_cond_patch.activation import activate_on_import as _activate_on_import
from jax_cond_patch.activation import activated as activated
from jax_cond_patch.activation import deactivate as deactivate
from jax_cond_patch.activation import deactivated as deactivated
from jax_cond_patch.activation import is_active as is_active
from jax_cond_patch.activation import pin as pin
from jax_cond_patch.activation import status as status
from jax_cond_patch.errors import JaxCondPatchError as JaxCondPatchError
from jax_cond_patch.errors import (
    UnsupportedJaxVersionError as UnsupportedJaxVersionError)
from jax_cond_patch.errors import (
    UnsupportedJaxVersionWarning as UnsupportedJaxVersionWarning)
from jax_cond_patch.errors import (
    UntestedJaxVersionWarning as UntestedJaxVersionWarning)
from jax_cond_patch.runner import (
    is_command_without_jax as _is_command_without_jax)

if _TYPE_CHECKING:
  from jax_cond_patch.explanation import Explanation as Explanation
  from jax_cond_patch.explanation import explain as explain

__version__ = "0.1.0"


def __getattr__(name: str):
  # Imported when it is used, for the time that it takes.
  if name in ("Explanation", "explain"):
    from jax_cond_patch import explanation
    return getattr(explanation, name)
  raise AttributeError(f"{__name__}.{name}")


if not _is_command_without_jax():
  _activate_on_import()
