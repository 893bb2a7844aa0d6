"""Random programs compute on each platform what plain Python computes."""
from absl.testing import absltest
import hypothesis
from jax._src import config
from jax._src import test_util as jtu

import jax_cond_patch
import jcp_test_util as tu
import random_programs

config.parse_flags_with_absl()


class PropertyTest(tu.JcpTestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(jax_cond_patch.pin, None)

  @hypothesis.settings(
      max_examples=200, deadline=None, derandomize=True, database=None,
      suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(random_programs.programs())
  @jtu.run_on_devices("cpu")
  def test_each_platform_computes_its_own(self, program):
    try:
      expected = random_programs.expected(program)
    except random_programs.TooClose:
      hypothesis.assume(False)
    random_programs.check(program, expected)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
