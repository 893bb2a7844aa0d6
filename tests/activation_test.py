"""Tests of activation, mostly in fresh interpreters."""
import os
import textwrap
import threading

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch.compat import releases
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.arange(4, dtype=np.float32)

PROGRAM = """
    import numpy as np
    X = np.arange(4, dtype=np.float32)

    def lower(f=None):
      import jax
      from jax import lax
      f = f or (lambda x: lax.platform_dependent(
          x, cpu=lambda x: x + 1.5, default=lambda x: x + 2.5))
      return jax.jit(f).lower(X).as_text()

    def is_patched(text):
      assert "1.5" in text
      return "2.5" not in text and "case" not in text
    """


def snapshot():
  """What stands in JAX wherever something is replaced."""
  return [replacement.place.get() for replacement in activation.table()]


class FreshInterpreterTest(tu.JcpTestCase):

  def assertRuns(self, code, **env):
    result = tu.run_python(
        textwrap.dedent(PROGRAM) + textwrap.dedent(code), **env)
    self.assertEqual(result.returncode, 0, result.stderr)
    return result

  @parameterized.parameters(
      "import jax_cond_patch, jax",
      "import jax, jax_cond_patch",
      "import jax; jax.numpy.ones(3) + 1; import jax_cond_patch",
      # JAX has traced, lowered and compiled the same program before.
      "assert lower() and not is_patched(lower()); import jax_cond_patch",
      "from jax.lax import platform_dependent; import jax_cond_patch",
      "import jax.experimental.pallas; import jax_cond_patch",
      "import jax_cond_patch, jax.experimental.pallas",
      f"import {tu.EXPORT_MODULE}, jax_cond_patch; jax_cond_patch.activate()")
  def test_import_order(self, imports):
    self.assertRuns(f"{imports}\nassert is_patched(lower())")

  @parameterized.parameters("before", "after")
  def test_modules_that_jax_imports_late(self, when):
    """Their rules are replaced when they are imported, and put back."""
    self.assertRuns(f"""
        import sys
        import jax
        if {when!r} == "before":
          from jax._src import checkify
          from jax.experimental import shard_map
        if jax.__version__ == "0.4.26":
          # The package imports it, see `internals.import_wrappers`.
          from jax.experimental.key_reuse import _core
        before = set(sys.modules)
        import jax_cond_patch
        from jax_cond_patch import activation
        def finders():
          return [f for f in sys.meta_path
                  if type(f).__module__.startswith("jax_cond_patch")]
        assert finders()
        if {when!r} == "after":
          assert not (set(sys.modules) - before) & set(
              activation._late_tables())
        def ours():
          return [r.place.get().__module__.startswith("jax_cond_patch")
                  for r in activation.table()
                  if r.name.startswith(("checkify", "shard_map", "export")) and
                  not r.is_addition]
        assert ours() and all(ours())
        status = jax_cond_patch.status()
        assert set(status.replaced) == {{r.name for r in activation.table()}}
        jax_cond_patch.deactivate()
        assert not any(ours())
        assert not finders()
        jax_cond_patch.activate()
        assert all(ours())
        """)

  def test_function_imported_before(self):
    self.assertRuns("""
        import jax
        from jax.lax import platform_dependent
        import jax_cond_patch
        f = lambda x: platform_dependent(
            x, cpu=lambda x: x + 1.5, default=lambda x: x + 2.5)
        assert is_patched(lower(f))
        """)

  def test_import_of_what_replaces_rules(self):
    """JAX 0.4.26 has a module that wraps those that it finds."""
    self.assertRuns("""
        import contextlib
        import jax_cond_patch
        with contextlib.suppress(ImportError):
          import jax.experimental.key_reuse
        assert is_patched(lower())
        jax_cond_patch.deactivate()
        assert not is_patched(lower())
        """)

  def test_code_is_not_reused_after_a_switch(self):
    self.assertRuns("""
        import jax, jax_cond_patch
        from jax import lax
        f = jax.jit(lambda x: lax.platform_dependent(
            x, cpu=lambda x: x + 1.5, default=lambda x: x + 2.5))
        def text():
          f(X)  # fills the caches of compiled calls too
          return f.lower(X).as_text()
        first = text()
        assert is_patched(first)
        jax_cond_patch.deactivate()
        second = text()
        assert not is_patched(second)
        jax_cond_patch.activate()
        assert text() == first
        jax_cond_patch.deactivate()
        assert text() == second
        """)

  @parameterized.parameters("0", "false", "False")
  def test_switched_off(self, value):
    self.assertRuns("""
        import jax_cond_patch
        assert not jax_cond_patch.is_active()
        status = jax_cond_patch.status()
        assert not status.active and "JAX_COND_PATCH=" in status.reason
        assert not is_patched(lower())
        jax_cond_patch.activate()
        assert is_patched(lower())
        """, JAX_COND_PATCH=value)

  @parameterized.parameters("1", "true", "TRUE")
  def test_switched_on(self, value):
    self.assertRuns("import jax_cond_patch\nassert jax_cond_patch.is_active()",
                    JAX_COND_PATCH=value)

  @parameterized.parameters("", "yes", "2")
  def test_switch_of_another_value(self, value):
    result = tu.run_python("import jax_cond_patch", JAX_COND_PATCH=value)
    self.assertNotEqual(result.returncode, 0)
    self.assertIn("must be one of 1, true, 0, false", result.stderr)

  def assertUnsupported(self, message, code="", **env):
    """The import warns once and leaves JAX alone; activation raises."""
    self.assertRuns(f"""
        import warnings
        import pretend
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          import jax_cond_patch
        ours = [w for w in caught if issubclass(
            w.category, jax_cond_patch.UnsupportedJaxVersionWarning)]
        assert len(ours) == 1, caught
        assert {message!r} in str(ours[0].message), ours[0].message
        assert ours[0].filename == "<string>", ours[0].filename
        assert not jax_cond_patch.is_active()
        assert {message!r} in jax_cond_patch.status().reason
        try:
          jax_cond_patch.activate()
        except jax_cond_patch.UnsupportedJaxVersionError as error:
          assert {message!r} in str(error)
        else:
          raise AssertionError
        """, **self.pretending(code), **env)

  def assertUntested(self, code="", **env):
    """The import warns once and patches JAX."""
    self.assertRuns("""
        import warnings
        import pretend
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          import jax_cond_patch
          jax_cond_patch.deactivate()
          jax_cond_patch.activate()
        ours, = [w for w in caught if issubclass(
            w.category, jax_cond_patch.UntestedJaxVersionWarning)]
        assert "not tested on JAX" in str(ours.message)
        assert ours.filename == "<string>", ours.filename
        assert is_patched(lower())
        """, **self.pretending(code), **env)

  def pretending(self, code) -> dict[str, str]:
    """An environment with a module `pretend` that holds some code."""
    path = self.create_tempdir().full_path
    with open(os.path.join(path, "pretend.py"), "w") as file:
      file.write(textwrap.dedent(code))
    return dict(PYTHONPATH=os.pathsep.join(
        [path, os.environ.get("PYTHONPATH", "")]))

  @parameterized.parameters("0.4.20", "0.6.0.dev20250401")
  def test_jax_that_is_not_in_the_table(self, version):
    code = f"import jax; jax.__version__ = {version!r}"
    self.assertUnsupported(
        f"JAX {version} is installed, and the supported releases are 0.4.21 to",
        code)
    self.assertUntested(code, JAX_COND_PATCH_UNTESTED="1")

  def test_newer_jax(self):
    code = """
        import jax, sys, types
        jax.__version__ = "0.99.0.dev20300101+cuda"
        sys.modules["jax_cond_patch.compat.structure"] = types.SimpleNamespace(
            differences=lambda replaced: [%s])
        """
    self.assertUntested(code % "")
    self.assertUnsupported("JAX_COND_PATCH_UNTESTED=1", code % "",
                           JAX_COND_PATCH_UNTESTED="0")
    changed = code % "'pe.some_rule is gone'"
    self.assertUnsupported("it has changed: pe.some_rule is gone", changed)
    self.assertUntested(changed, JAX_COND_PATCH_UNTESTED="1")

  @parameterized.parameters("", "2", "maybe")
  def test_untested_of_another_value(self, value):
    result = tu.run_python(
        "import pretend, jax_cond_patch", JAX_COND_PATCH_UNTESTED=value,
        **self.pretending("import jax; jax.__version__ = '0.99.3'"))
    self.assertNotEqual(result.returncode, 0)
    self.assertIn("JAX_COND_PATCH_UNTESTED is", result.stderr)

  def test_newer_jax_that_lacks_something(self):
    self.assertUnsupported("mlir.lower_per_platform is gone", """
        import jax
        jax.__version__ = "0.99.3"
        from jax._src.interpreters import mlir
        del mlir.lower_per_platform
        """)

  def test_no_jax(self):
    self.assertUnsupported("no JAX is installed", """
        import importlib.metadata, sys
        def version(name):
          raise importlib.metadata.PackageNotFoundError(name)
        importlib.metadata.version = version
        sys.modules["jax"] = None
        """)

  def test_jaxlib_that_does_not_fit(self):
    path = self.create_tempdir().full_path
    os.mkdir(os.path.join(path, "jaxlib"))
    for name in ("__init__", "version"):
      with open(os.path.join(path, "jaxlib", f"{name}.py"), "w") as file:
        file.write("__version__ = '0.0.1'")
    self.assertUnsupported(
        "with jaxlib 0.0.1 cannot be imported", f"""
        import sys
        sys.path.insert(0, {path!r})
        """)

  def test_missing_name(self):
    self.assertRuns("""
        import os
        os.environ["JAX_COND_PATCH"] = "0"
        import jax_cond_patch
        from jax_cond_patch import activation
        from jax._src.interpreters import mlir
        before = [r.place.get() for r in activation.table()]
        original = mlir.__dict__.pop("lower_per_platform")
        try:
          jax_cond_patch.activate()
        except jax_cond_patch.JaxCondPatchError as error:
          assert "mlir.lower_per_platform" in str(error)
        else:
          raise AssertionError
        mlir.lower_per_platform = original
        after = [r.place.get() for r in activation.table()]
        assert all(a is b for a, b in zip(before, after))
        assert not jax_cond_patch.is_active()
        """)

  def test_error_in_the_middle(self):
    self.assertRuns("""
        import os
        os.environ["JAX_COND_PATCH"] = "0"
        import dataclasses
        import jax_cond_patch
        from jax_cond_patch import activation
        table = activation.table()
        before = [r.place.get() for r in table]

        class Failing:
          def __init__(self, place):
            self.get, self.remove = place.get, place.remove
          def set(self, value):
            raise KeyboardInterrupt

        for i, replacement in enumerate(table):
          failing = [*table]
          failing[i] = dataclasses.replace(
              replacement, place=Failing(replacement.place))
          activation._table = lambda: failing
          try:
            jax_cond_patch.activate()
          except KeyboardInterrupt:
            pass
          else:
            raise AssertionError
          after = [r.place.get() for r in table]
          assert all(a is b for a, b in zip(before, after)), i
          assert not jax_cond_patch.is_active()
        """)

  def test_import_adds_no_other_module_of_jax(self):
    self.assertRuns("""
        import sys
        import jax
        import jax.numpy as jnp
        before = set(sys.modules)
        import jax_cond_patch
        added = {m for m in set(sys.modules) - before if m.startswith("jax.")}
        assert "jax._src.pallas" not in {m[:15] for m in added}, added
        """)


class ActivationTest(tu.JcpTestCase):

  def test_exact_undo(self):
    with jax_cond_patch.deactivated():
      original = snapshot()
      with jax_cond_patch.activated():
        patched = snapshot()
      again = snapshot()
    for replacement, a, b, c in zip(
        activation.table(), original, patched, again):
      self.assertIs(a, c, replacement.name)
      self.assertIsNot(a, b, replacement.name)

  def test_idempotent(self):
    before = snapshot()
    jax_cond_patch.activate()
    self.assertTrue(all(a is b for a, b in zip(before, snapshot())))
    with jax_cond_patch.deactivated():
      before = snapshot()
      jax_cond_patch.deactivate()
      self.assertTrue(all(a is b for a, b in zip(before, snapshot())))

  def test_contexts_restore(self):
    self.assertTrue(jax_cond_patch.is_active())
    with jax_cond_patch.activated():
      self.assertTrue(jax_cond_patch.is_active())
    self.assertTrue(jax_cond_patch.is_active())
    with jax_cond_patch.deactivated():
      self.assertFalse(jax_cond_patch.is_active())
      with jax_cond_patch.activated():
        self.assertTrue(jax_cond_patch.is_active())
      self.assertFalse(jax_cond_patch.is_active())
    self.assertTrue(jax_cond_patch.is_active())
    with self.assertRaises(ZeroDivisionError):
      with jax_cond_patch.deactivated():
        1 / 0
    self.assertTrue(jax_cond_patch.is_active())

  def test_something_else_on_top(self):
    from jax._src.interpreters import mlir
    ours = mlir.lower_per_platform
    mlir.lower_per_platform = lambda *args, **kwargs: ours(*args, **kwargs)
    before = snapshot()
    try:
      with self.assertRaisesRegex(
          jax_cond_patch.JaxCondPatchError, "mlir.lower_per_platform"):
        jax_cond_patch.deactivate()
      self.assertTrue(all(a is b for a, b in zip(before, snapshot())))
      self.assertTrue(jax_cond_patch.is_active())
    finally:
      mlir.lower_per_platform = ours

  def test_status(self):
    status = jax_cond_patch.status()
    self.assertTrue(status.active)
    self.assertEqual(status.jax_version, jax.__version__)
    self.assertEqual(status.era, releases.find(jax.__version__).era)
    self.assertCountEqual(
        status.replaced, [r.name for r in activation.table()])
    with jax_cond_patch.deactivated():
      status = jax_cond_patch.status()
      self.assertFalse(status.active)
      self.assertEmpty(status.replaced)

  def test_log(self):
    f = lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
    with self.assertLogs("jax_cond_patch", "DEBUG") as logs:
      with jax_cond_patch.deactivated():
        pass
      jax.jit(f).lower(X)
    messages = [record.getMessage() for record in logs.records]
    self.assertSequenceEqual(messages, [
        "JAX is as it was before it was patched",
        f"JAX {jax.__version__} is patched in {len(activation.table())} places",
        "lowering <lambda> for cpu"])

  def test_log_is_silent_by_default(self):
    result = tu.run_python("""
        import jax_cond_patch, jax
        jax_cond_patch.deactivate()
        """)
    self.assertEqual((result.returncode, result.stdout, result.stderr),
                     (0, "", ""))

  def test_names_are_unique_and_reasons_given(self):
    names = [r.name for r in activation.table()]
    self.assertLen(set(names), len(names))
    for replacement in activation.table():
      self.assertNotEmpty(replacement.why)

  def test_era_is_that_of_the_table(self):
    from jax_cond_patch.compat import internals
    era = releases.find(jax.__version__).era
    self.assertEqual(internals.native, era == "native")

  def test_jaxpr_traced_before(self):
    """A conditional traced without the package works with it."""
    f = lambda x: lax.platform_dependent(
        x, cpu=jnp.sin, default=jnp.cos)
    with jax_cond_patch.deactivated():
      jaxpr = jax.make_jaxpr(f)(X)
    run = lambda x: jax.core.eval_jaxpr(
        jaxpr.jaxpr, jaxpr.consts, x)[0]
    self.assertAllClose(jax.jit(run)(X), np.sin(X))
    self.assertAllClose(jax.jit(jax.grad(lambda x: run(x).sum()))(X), np.cos(X))

  def test_switching_in_threads(self):
    errors = []
    def switch():
      try:
        for _ in range(5):
          jax_cond_patch.deactivate()
          jax_cond_patch.activate()
      except BaseException as error:
        errors.append(error)
    threads = [threading.Thread(target=switch) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEmpty(errors)
    self.assertTrue(jax_cond_patch.is_active())
    self.assertLen(jax_cond_patch.status().replaced, len(activation.table()))


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
