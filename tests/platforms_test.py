"""Tests of the owners of platforms."""
from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from jax_cond_patch import platforms

NAMES = ("cpu", "cuda", "rocm", "tpu")


@st.composite
def branches_platforms(draw):
  named = draw(st.lists(st.sampled_from(NAMES), unique=True))
  cuts = sorted(draw(st.lists(st.integers(0, len(named)))))
  groups = [tuple(named[a:b]) for a, b in
            zip([0, *cuts], [*cuts, len(named)]) if a < b]
  return (*groups, *([None] if draw(st.booleans()) else []))


class PlatformsTest(parameterized.TestCase):

  @parameterized.parameters(
      ((("tpu",), None), "tpu", 0),
      ((("tpu",), None), "cpu", 1),
      ((("tpu", "cpu"), ("cuda",)), "cpu", 0),
      ((("tpu",), ("cuda",)), "cpu", None),
      ((None,), "cpu", 0),
      ((), "cpu", None))
  def test_owner(self, branches, platform, expected):
    self.assertEqual(platforms.owner(branches, platform), expected)

  def test_reachable_keeps_both_orders(self):
    found = platforms.reachable(
        (("tpu",), ("rocm", "cuda"), None), ("cpu", "cuda", "rocm"))
    self.assertEqual(found.branches, (1, 2))
    self.assertEqual(found.owned, (("cuda", "rocm"), ("cpu",)))
    self.assertEqual(found.missing, ())

  @hypothesis.given(
      branches_platforms(),
      st.lists(st.sampled_from(NAMES), unique=True, min_size=1).map(tuple))
  def test_reachable_is_a_partition(self, branches, lowering_platforms):
    found = platforms.reachable(branches, lowering_platforms)
    owned = [p for names in found.owned for p in names]
    self.assertCountEqual([*owned, *found.missing], lowering_platforms)
    self.assertSequenceEqual(found.branches, sorted(set(found.branches)))
    for branch, names in zip(found.branches, found.owned):
      self.assertNotEmpty(names)
      for name in names:
        self.assertEqual(platforms.owner(branches, name), branch)

  @parameterized.parameters(
      ((("tpu",), ("cuda", "rocm")), "'tpu', 'cuda', 'rocm'"),
      ((("tpu",), None), "'tpu', a default"),
      ((), "none"))
  def test_describe(self, branches, expected):
    self.assertEqual(platforms.describe(branches), expected)


if __name__ == "__main__":
  absltest.main()
