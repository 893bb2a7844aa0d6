"""The only code that knows JAX versions.

`releases` is the table of supported releases and imports no JAX; `internals`
is what the rest of the package needs of JAX's internals, the same on each.
"""
