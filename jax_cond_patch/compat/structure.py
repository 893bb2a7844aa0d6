"""What the newest tested JAX looks like, where this package touches it.

A JAX that is newer than that is patched if it looks the same there. To record
it, with that JAX: `python -m jax_cond_patch.compat.structure`.
"""
from __future__ import annotations

import ast
from collections.abc import Iterable
import functools
import hashlib
import importlib
import inspect
import json
import pathlib
import textwrap
from typing import Any

_RECORD = pathlib.Path(__file__).with_name("structure.json")

# What is called or relied on, besides what is replaced.
CALLED = (
    "interpreters.mlir.LoweringRuleContext.replace",
    "interpreters.mlir.LoweringRuleEntry",
    "interpreters.mlir.ModuleContext.replace",
    "interpreters.mlir.TokenSet.update_tokens",
    "interpreters.mlir._aval_to_ir_types",
    "interpreters.mlir._platforms_for_eqn_ctx",
    "interpreters.mlir.compare_hlo",
    "interpreters.mlir.ir_constant",
    "interpreters.mlir.ir_consts",
    "interpreters.mlir.lower_with_sharding_in_types",
    "interpreters.partial_eval.JaxprTracer",
    "interpreters.partial_eval.dce_jaxpr",
    "interpreters.partial_eval.new_eqn_recipe",
    "interpreters.pxla._dce_jaxpr",
    "lax.control_flow.conditionals._switch_internal",
    "core.Jaxpr.replace",
    "core.JaxprEqn.replace",
    "core.gensym",
    "dispatch.get_intermediate_shardings",
    "source_info_util.summarize",
)

# Where a replaced function is called by its name.
CALLERS = (
    ("pjit", "pxla.lower_sharding_computation("),
    ("interpreters.mlir", "out_vals, tokens_out = jaxpr_subcomp("),
    ("interpreters.mlir", "out, tokens = jaxpr_subcomp("),
    ("interpreters.mlir", "ans = lower_per_platform("),
)


def differences(replaced: Iterable[tuple[str, Any]]) -> list[str]:
  """Says where the installed JAX is not what was recorded.

  Args:
    replaced: what is replaced in it, and its name.

  Returns:
    Clauses for a message, none if nothing has changed.
  """
  recorded = json.loads(_RECORD.read_text())
  found: dict[str, Any] = shape(replaced)
  changes = []
  for name in {**recorded, **found}:
    if name not in found:
      changes.append(f"{name} is not replaced any more")
    elif found[name] is None:
      changes.append(f"{name} is gone")
    elif name not in recorded:
      changes.append(f"{name} is new")
    elif found[name] != recorded[name]:
      was, now = recorded[name][0], found[name][0]
      changes.append(f"{name} was {was}, and is {now}" if was != now else
                     f"the code of {name} has changed")
  return changes


def shape(replaced: Iterable[tuple[str, Any]]) -> dict[str, list[str] | None]:
  """What is recorded of a JAX, by name.

  For a function, its parameters and, if it is replaced, a hash of its code;
  None for what there is not.
  """
  shapes = {name: _shape_of(value, with_code=True) for name, value in replaced}
  for path in CALLED:
    shapes[path] = _shape_of(_find(path))
  for path, call in CALLERS:
    is_there = call in inspect.getsource(_find(path))
    shapes[f"`{call}...)` in {path}"] = ["there"] if is_there else None
  return shapes


def _find(path: str) -> Any:
  """Returns what has this name in `jax._src`, or None."""
  parts = path.split(".")
  for end in range(len(parts), 0, -1):
    try:
      holder: Any = importlib.import_module(
          ".".join(["jax._src", *parts[:end]]))
    except ImportError:
      continue
    return functools.reduce(
        lambda found, part: getattr(found, part, None), parts[end:], holder)
  return None


def _shape_of(value, with_code: bool = False) -> list[str] | None:
  if value is None:
    return None
  if inspect.iscode(value):
    return ["code", _hash(value)]
  try:
    parameters = inspect.signature(value).parameters.values()
  except ValueError:  # It is written in C++.
    return [type(value).__name__]
  text = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
  return [f"({text})"] + ([_hash(inspect.unwrap(value))] if with_code else [])


def _hash(fun) -> str:
  """A hash of the code of a function, without what does not run."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  tree = ast.parse(textwrap.dedent(inspect.getsource(fun)))
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef):
      node.returns = None
      node.decorator_list = []
      if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    elif isinstance(node, ast.arg):
      node.annotation = None
  return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]


def main() -> None:
  """Records the installed JAX."""
  from jax_cond_patch import activation
  with activation.deactivated():
    found = shape(activation.replaced())
  _RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  main()
