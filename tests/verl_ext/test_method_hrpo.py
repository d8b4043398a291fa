"""HRPO against the formula computed by hand, and its invariants."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.advantages import DELTA, hop_advantages

Row = tuple[float, int, bool]
REWARDS = st.floats(-2, 2, allow_subnormal=False)
rows = st.lists(st.tuples(REWARDS, st.integers(1, 4), st.booleans()), min_size=1, max_size=30)


def advantages(batch: list[Row]) -> np.ndarray:
    rewards, hops, valid = zip(*batch, strict=True)
    return hop_advantages(rewards, hops, valid)


def by_hand(batch: list[Row]) -> list[float]:
    """The formula row by row in exact rational arithmetic, up to the square root."""
    expected = []
    for reward, hop, valid in batch:
        group = [Fraction(r) for r, h, v in batch if v and h == hop]
        if not valid:
            expected.append(0.0)
            continue
        mean = sum(group, Fraction(0)) / len(group)
        variance = sum(((r - mean) ** 2 for r in group), Fraction(0)) / len(group)
        expected.append(float(Fraction(reward) - mean) / math.sqrt(float(variance + Fraction(DELTA))))
    return expected


@given(rows)
def test_advantages_are_the_formula(batch):
    np.testing.assert_allclose(advantages(batch), by_hand(batch), atol=1e-9)


@given(rows, st.sampled_from([math.nan, math.inf, -1e30, 7.0]))
def test_invalid_rows_influence_nothing(batch, garbage):
    poisoned = [row if row[2] else (garbage, row[1], False) for row in batch]
    np.testing.assert_array_equal(advantages(poisoned), advantages(batch))


def test_small_groups_are_as_computed_by_hand() -> None:
    # The population's deviation, a lone row, and equal rewards.
    np.testing.assert_allclose(hop_advantages([0, 1], [1, 1], [True, True], delta=0), [-1, 1])
    assert hop_advantages([0.9, 0.1, 0.7], [4, 1, 1], [True] * 3)[0] == 0
    np.testing.assert_array_equal(hop_advantages([0.3] * 3, [2] * 3, [True] * 3), 0)


def test_bad_rewards_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        hop_advantages([0.0, math.nan], [1, 1], [True, True])
    with pytest.raises(ValueError, match="one shape"):
        hop_advantages([0.0, 1.0], [1], [True, True])
