"""HRPO against the formula by hand, GRPO against veRL's, and the invariants of both."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_ext.method.advantages import DELTA, group_advantages, hop_advantages, hop_balanced

BOTH = pytest.mark.parametrize("compare", [hop_advantages, group_advantages], ids=["HRPO", "GRPO"])
# Eighths are exact in float32, so equal rewards have a deviation of exactly 0 in veRL too.
REWARDS = st.integers(0, 8).map(lambda eighths: eighths / 8)
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=6), min_size=1, max_size=6)
ANY = REWARDS | st.floats(-2, 2, allow_subnormal=False)
ROWS = st.lists(st.tuples(ANY, st.integers(1, 4), st.booleans()), min_size=1, max_size=30)


def advantages(compare, rows):
    return compare(*zip(*rows, strict=True))


def by_hand(rows):
    """HRPO's formula row by row in exact rational arithmetic, up to the square root."""
    expected = []
    for reward, hop, valid in rows:
        group = [Fraction(r) for r, h, v in rows if v and h == hop]
        if not valid:
            expected.append(0.0)
            continue
        mean = sum(group, Fraction(0)) / len(group)
        variance = sum(((r - mean) ** 2 for r in group), Fraction(0)) / len(group)
        expected.append(float(Fraction(reward) - mean) / math.sqrt(float(variance + Fraction(DELTA))))
    return expected


@given(ROWS)
def test_hrpos_advantages_are_the_formula(rows):
    np.testing.assert_allclose(advantages(hop_advantages, rows), by_hand(rows), atol=1e-9)


@given(GROUPS)
def test_whole_groups_have_veRLs_advantages(groups):
    rewards = [reward for group in groups for reward in group]
    labels = np.array([f"p{number}" for number, group in enumerate(groups) for _ in group], dtype=object)
    ones = torch.ones(len(rewards), 1)
    theirs, _ = compute_grpo_outcome_advantage(torch.tensor(rewards)[:, None], ones, labels)
    ours = group_advantages(rewards, labels, [True] * len(rewards))
    np.testing.assert_allclose(ours, theirs.squeeze(1), atol=1e-4)


@given(st.lists(st.tuples(REWARDS, st.integers(1, 4), st.booleans()), min_size=1, max_size=30))
def test_each_group_has_mean_zero_and_sample_variance_one_or_zero(rows):
    result = advantages(group_advantages, rows)
    for label in range(1, 5):
        own = [(a, r) for a, (r, g, v) in zip(result, rows, strict=True) if v and g == label]
        values = [value for value, _ in own]
        if len({reward for _, reward in own}) > 1:
            assert np.mean(values) == pytest.approx(0.0, abs=1e-9)
            assert np.std(values, ddof=1) == pytest.approx(1.0, abs=1e-3)
        else:
            assert not any(values)


@BOTH
@given(rows=ROWS, garbage=st.sampled_from([math.nan, math.inf, -1e30, 7.0]))
def test_invalid_rows_get_nothing_and_influence_nothing(compare, rows, garbage):
    poisoned = [row if row[2] else (garbage, row[1], False) for row in rows]
    result = advantages(compare, poisoned)
    np.testing.assert_array_equal(result, advantages(compare, rows))
    assert not any(value for value, row in zip(result, rows, strict=True) if not row[2])


@BOTH
def test_a_lone_row_and_equal_rewards_have_advantage_zero(compare):
    assert compare([0.9, 0.1, 0.7, 0.3], [4, 1, 1, 4], [True] * 3 + [False])[0] == 0
    np.testing.assert_array_equal(compare([0.3] * 3, [2] * 3, [True] * 3), 0)
    # A third is not exact in floating point, and neither are mean and deviation of equal ones.
    np.testing.assert_array_equal(group_advantages([1 / 3] * 7, [2] * 7, [True] * 7), 0)


@BOTH
def test_bad_rewards_and_shapes_are_refused(compare):
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        compare([0.0, math.nan], [1, 1], [True, True])
    with pytest.raises(ValueError, match="one shape"):
        compare([0.0, 1.0], [1], [True, True])


EIGHTHS = st.integers(-8, 8).map(lambda eighths: eighths / 8)


@given(st.lists(st.tuples(EIGHTHS, st.sampled_from([1, 2, 3]))))
def test_hop_counts_share_an_update_equally(rows):
    given_sizes = np.array([advantage for advantage, _ in rows])
    hops = np.array([hop for _, hop in rows])
    result = hop_balanced(given_sizes, hops)
    totals = {hop: np.abs(given_sizes[hops == hop]).sum() for hop in set(hops.tolist())}
    shares = [hop for hop, total in totals.items() if total]
    for hop in shares:
        own = np.abs(result[hops == hop]).sum()
        assert own == pytest.approx(np.abs(given_sizes).sum() / len(shares))
    np.testing.assert_array_equal(np.sign(result), np.sign(given_sizes))
