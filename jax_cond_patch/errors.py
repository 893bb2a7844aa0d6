"""Errors of patching itself.

Where JAX raises (`NotImplementedError`, `TypeError`, ...) this package raises
the same types; what is here says that JAX could not be patched or unpatched.
"""
from __future__ import annotations


class JaxCondPatchError(Exception):
  """JAX could not be patched or unpatched; JAX is as it was before."""


class UnsupportedJaxVersionError(JaxCondPatchError):
  """The installed JAX is not one that this package knows how to patch."""


class UnsupportedJaxVersionWarning(UserWarning):
  """`import jax_cond_patch` left an unknown JAX as it is."""


class UntestedJaxVersionWarning(UserWarning):
  """A JAX that is newer than the tested releases has been patched."""
