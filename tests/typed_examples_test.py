"""Calls of the public functions as users write them, for the type checker.

mypy checks this file strictly; what it needs of the package is there if this
type-checks. It runs as a test, too, so that it says what is.
"""
from __future__ import annotations

from absl.testing import absltest
import numpy as np

import jax_cond_patch


def replaced() -> tuple[str, ...]:
  status: jax_cond_patch.Status = jax_cond_patch.status()
  version: str | None = status.jax_version
  return status.replaced if version is not None and status.active else ()


def switched() -> bool:
  with jax_cond_patch.deactivated():
    off: bool = jax_cond_patch.is_active()
    with jax_cond_patch.activated():
      on: bool = jax_cond_patch.is_active()
  try:
    jax_cond_patch.activate()
  except jax_cond_patch.UnsupportedJaxVersionError as error:
    raise SystemExit(str(error)) from error
  return on and not off


def pinned() -> tuple[str, ...] | None:
  jax_cond_patch.activate(pin=("cpu",), defer=True)
  pin: tuple[str, ...] | None = jax_cond_patch.status().pin
  jax_cond_patch.pin(None)
  return pin


def failing_primitives() -> list[str]:
  explanation: jax_cond_patch.Explanation = jax_cond_patch.explain(
      lambda x: x, np.float32(1), platforms=["cpu", "tpu"])
  return [failure.primitive
          for conditional in explanation.conditionals
          for branch in conditional.branches
          for failure in branch.failures
          if explanation.fails_on("tpu")]


class TypedExamplesTest(absltest.TestCase):

  def test_they_run(self) -> None:
    self.assertNotEmpty(replaced())
    self.assertTrue(switched())
    self.assertEqual(pinned(), ("cpu",))
    self.assertEmpty(failing_primitives())


if __name__ == "__main__":
  absltest.main()
