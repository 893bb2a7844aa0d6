"""Tests of the demo and of the command line."""
import dataclasses
import re
import subprocess
import sys

from absl.testing import absltest
from jax._src import config
from jax._src import test_util as jtu

from jax_cond_patch import __main__ as command_line
from jax_cond_patch import demo
import jcp_test_util as tu

config.parse_flags_with_absl()


class DemoTest(tu.JcpTestCase):

  def test_demo(self):
    result = subprocess.run(
        [sys.executable, "-m", "jax_cond_patch", "demo"], text=True,
        stdin=subprocess.DEVNULL, capture_output=True, check=False)
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
    for program in demo.PROGRAMS.values():
      self.assertIn(program.title, result.stdout)
    after = re.findall(r"^  after .*$", result.stdout, re.M)
    self.assertLen(after, len(demo.PROGRAMS))
    for row, program in zip(after, demo.PROGRAMS.values()):
      lacks = ("gmm" in program.title and not tu.has("megablox") or
               len(program.platforms) > 1 and tu.EXPORT_MODULE != "jax.export")
      self.assertIn("not in this JAX" if lacks else "relative error", row)
    self.assertNotEmpty(result.stderr)  # it shows its progress

  def test_a_program_that_is_wrong(self):
    """A wrong value is no success, and neither is an error."""
    program = demo.PROGRAMS["kernel-jit"]
    off = dataclasses.replace(program, reference=lambda x: x * 3.)
    self.assertFalse(demo.run_program(off).is_right)
    raises = dataclasses.replace(program, fun=lambda x: 1 / 0)
    outcome = demo.run_program(raises)
    self.assertFalse(outcome.is_right)
    self.assertIn("ZeroDivisionError", outcome.result)

  def test_no_command(self):
    with self.assertRaises(SystemExit) as exit_:
      command_line.main([])
    self.assertEqual(exit_.exception.code, 2)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
