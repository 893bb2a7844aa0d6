"""Tests of the command line, in fresh interpreters."""
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src import config
from jax._src import test_util as jtu

import jax_cond_patch
from jax_cond_patch import activation
from jax_cond_patch import runner
import jcp_test_util as tu

config.parse_flags_with_absl()

ROOT = str(pathlib.Path(jax_cond_patch.__file__).parent.parent)

# Tells whether this process lowers the branch of its platform alone.
IS_PATCHED = """
import sys
def is_patched():
  import jax
  f = lambda x: jax.lax.platform_dependent(
      x, cpu=lambda x: x + 1.5, default=lambda x: x + 2.5)
  return "2.5" not in jax.jit(f).lower(1.).as_text()
"""


def python(*args, **env) -> subprocess.CompletedProcess:
  path = os.pathsep.join([ROOT, env.pop("PYTHONPATH", "")]).rstrip(os.pathsep)
  return subprocess.run(
      [sys.executable, *args], text=True, capture_output=True, check=False,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **env})


def run(*args, **env) -> subprocess.CompletedProcess:
  return python("-m", "jax_cond_patch", "run", *args, **env)


class MainTest(tu.JcpTestCase):

  def write(self, name, code) -> str:
    return self.create_tempfile(name, textwrap.dedent(code)).full_path

  def assertPrints(self, result, *lines):
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertSequenceEqual(result.stdout.splitlines(), lines)

  def test_status(self):
    result = python("-m", "jax_cond_patch", "status")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertRegex(result.stdout, rf"(?m)^JAX +{jax.__version__}$")
    self.assertRegex(result.stdout, "(?m)^active +yes: activated$")
    for replacement in activation.table():
      self.assertRegex(result.stdout, rf"(?m)^  {replacement.name} ".replace(
          "[", r"\[").replace("]", r"\]"))

  def test_status_of_pin_and_switches(self):
    result = python("-m", "jax_cond_patch", "status",
                    JAX_COND_PATCH_PIN="cpu, tpu", JAX_COND_PATCH_DEFER="0")
    self.assertRegex(result.stdout, "(?m)^pin +cpu, tpu$")
    self.assertRegex(result.stdout, "(?m)^defers errors +no$")
    self.assertRegex(result.stdout, "(?m)^switches +JAX_COND_PATCH_DEFER=0 "
                     "JAX_COND_PATCH_PIN=cpu, tpu$")

  def test_status_in_json(self):
    result = python("-m", "jax_cond_patch", "status", "--json",
                    JAX_COND_PATCH="0")
    self.assertEqual(result.returncode, 0, result.stderr)
    status = json.loads(result.stdout)
    self.assertEqual(status["active"], False)
    self.assertEqual(status["reason"], "JAX_COND_PATCH=0")
    self.assertEqual(status["jax_version"], jax.__version__)

  @parameterized.parameters("script", "module", "code")
  def test_run_is_as_python(self, kind):
    """The same output, traceback and exit status as without the package."""
    code = """
        import os, sys
        print(sys.argv, __name__, __spec__ and __spec__.name, sys.path)
        print("jax" in sys.modules)
        print({k: v for k, v in os.environ.items() if "PATH" in k}, sys.flags)
        if "--raise" in sys.argv:
          def f():
            raise KeyError("mine")
          f()
        sys.exit(7)
        """
    path = self.write("program_of_mine.py", code)
    program = dict(script=[path], module=["-m", "program_of_mine"],
                   code=["-c", textwrap.dedent(code)])[kind]
    folder = os.path.dirname(path)
    for args in (["-m", "a b", "--", "--children"], ["--raise"]):
      # Switched off, `run` itself does not import JAX, which takes long.
      expected = python("-W", "error", *program, *args, PYTHONPATH=folder)
      result = python("-W", "error", "-m", "jax_cond_patch", "run", *program,
                      *args, PYTHONPATH=folder, JAX_COND_PATCH="0")
      self.assertEqual(result.returncode, expected.returncode)
      self.assertEqual(result.returncode, 1 if "--raise" in args else 7)
      self.assertMultiLineEqual(result.stdout, expected.stdout)
      self.assertMultiLineEqual(result.stderr, expected.stderr)

  def test_run_patches(self):
    path = self.write("program.py", IS_PATCHED + """
        import os, subprocess
        os.environ["JAX_LOG_COMPILES"] = "1"
        print(is_patched(), sys.modules["jax"].config.jax_log_compiles,
              flush=True)
        child = subprocess.run([sys.executable, "-c", "import jax, sys; "
                                "print('jax_cond_patch' in sys.modules)"])
        """.replace("\n        ", "\n"))
    result = run(path)
    self.assertEqual(result.returncode, 0, result.stderr)
    # The program's own change of the environment comes before JAX reads it.
    self.assertSequenceEqual(result.stdout.split(), ["True", "True", "False"])

  def test_run_starts_without_jax(self):
    """Only the program imports it, and only if it does so."""
    result = python("-X", "importtime", "-m", "jax_cond_patch", "run", "-c",
                    "import sys; print('jax' in sys.modules)")
    self.assertPrints(result, "False")
    self.assertRegex(result.stderr, r"\| +jax_cond_patch\.runner\n")
    self.assertNotRegex(result.stderr, r"\| +jax(\._src)?\n")

  def test_run_patches_children(self):
    path = self.write("program.py", IS_PATCHED + """
        import multiprocessing, os, subprocess
        def work(queue):
          queue.put(is_patched())
        if __name__ == "__main__":
          for method in ("spawn", "fork"):
            context = multiprocessing.get_context(method)
            queue = context.SimpleQueue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            print(method, queue.get())
            process.join()
            assert process.exitcode == 0, process.exitcode
        """.replace("\n        ", "\n"))
    self.assertPrints(run("--children", path), "spawn True", "fork True")

  def test_run_keeps_another_sitecustomize(self):
    folder = os.path.dirname(self.write("sitecustomize.py", """
        import sys
        print("mine", any("startup" in path for path in sys.path))
        """))
    result = run("-c", "import sitecustomize; print('done')",
                 PYTHONPATH=folder, JAX_COND_PATCH="0")
    # Once in the Python of `run` itself, once in the program's.
    self.assertPrints(result, "mine False", "mine False", "done")

  def test_run_with_an_ignored_environment(self):
    result = python("-E", "-c", "import sys; "
                    f"sys.path.insert(0, {ROOT!r}); "
                    "from jax_cond_patch import runner; "
                    "sys.exit(runner.run(['program.py'], False))")
    self.assertEqual(result.returncode, 2)
    self.assertIn("Leave out the options -I, -E and -S", result.stderr)

  def test_run_nothing(self):
    result = run("--children")
    self.assertEqual(result.returncode, 2)
    self.assertIn("there is no program to run", result.stderr)

  @parameterized.parameters(
      (["a.py", "-m"], [], ["a.py", "-m"]),
      (["--children", "-m", "a", "--children"],
       ["--children"], ["-m", "a", "--children"]),
      (["-h"], ["-h"], []), (["-", "x"], [], ["-", "x"]))
  def test_split_program(self, argv, options, program):
    self.assertEqual(runner.split_program(argv), (options, program))

  @parameterized.parameters("off", "tracebackhide", "remove_frames")
  def test_traceback(self, filtering):
    """The user's line and what to do stand in it, filtered or not."""
    path = self.write("mine.py", """
        import jax, jax_cond_patch
        @jax.jit
        def f(x):
          return jax.lax.platform_dependent(x, tpu=jax.numpy.sin)
        f(1.)
        """)
    result = python(path, JAX_TRACEBACK_FILTERING=filtering)
    self.assertEqual(result.returncode, 1)
    self.assertIn(f'File "{path}", line 6, in <module>', result.stderr)
    last = re.findall(r"(?m)^NotImplementedError: .*$", result.stderr)[-1]
    self.assertIn("has no branch for 'cpu'", last)
    self.assertIn(f"{path}:5", last)
    self.assertIn("Add a branch `cpu=` or `default=`.", last)
    if filtering == "remove_frames":
      # The frames of JAX and of ours are in the exception that it stands for.
      *_, filtered = result.stderr.split("direct cause of the following")
      self.assertNotIn(os.path.join(ROOT, "jax_cond_patch"), filtered)
      self.assertNotIn("site-packages", filtered)

  @parameterized.parameters("plugin", "conftest")
  def test_pytest(self, how):
    test = self.write("it_test.py", IS_PATCHED + """
        def test_it():
          assert is_patched()
        """.replace("\n        ", "\n"))
    options = ["-p", "no:cacheprovider", "--rootdir", os.path.dirname(test)]
    if how == "plugin":
      options += ["-p", "jax_cond_patch"]
    else:
      self.write("conftest.py", "import jax_cond_patch\n")
    result = python("-m", "pytest", "-q", *options, test)
    self.assertEqual(result.returncode, 0, result.stdout)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
