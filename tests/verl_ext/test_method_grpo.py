"""GRPO advantages: veRL's where every row counts, and their invariants elsewhere."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_ext.method.advantages import group_advantages, hop_balanced

Row = tuple[float, str, bool]
# Eighths are exact in float32, so equal rewards have a deviation of exactly 0 in veRL too.
REWARDS = st.integers(0, 8).map(lambda eighths: eighths / 8)
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=6), min_size=1, max_size=6)
ROWS = st.lists(st.tuples(REWARDS, st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=30)


def advantages(rows: list[Row]) -> np.ndarray:
    rewards, groups, valid = zip(*rows, strict=True)
    return group_advantages(rewards, groups, valid)


@given(GROUPS)
def test_whole_groups_have_veRLs_advantages(groups):
    rewards = [reward for group in groups for reward in group]
    labels = np.array([f"p{number}" for number, group in enumerate(groups) for _ in group], dtype=object)
    ones = torch.ones(len(rewards), 1)
    theirs, _ = compute_grpo_outcome_advantage(torch.tensor(rewards)[:, None], ones, labels)
    ours = group_advantages(rewards, labels, [True] * len(rewards))
    np.testing.assert_allclose(ours, theirs.squeeze(1), atol=1e-4)


@given(ROWS)
def test_each_group_has_mean_zero_and_sample_variance_one_or_zero(rows):
    result = advantages(rows)
    for label in "abcd":
        own = [(a, r) for a, (r, g, v) in zip(result, rows, strict=True) if v and g == label]
        if len({reward for _, reward in own}) > 1:
            values = [value for value, _ in own]
            assert np.mean(values) == pytest.approx(0.0, abs=1e-9)
            assert np.std(values, ddof=1) == pytest.approx(1.0, abs=1e-3)
        else:
            assert all(value == 0 for value, _ in own)


@given(ROWS, st.sampled_from([math.nan, math.inf, -1e30, 7.0]))
def test_invalid_rows_get_nothing_and_influence_nothing(rows, garbage):
    poisoned = [row if row[2] else (garbage, row[1], False) for row in rows]
    result = advantages(poisoned)
    np.testing.assert_array_equal(result, advantages(rows))
    assert all(value == 0 for value, row in zip(result, rows, strict=True) if not row[2])


def test_one_row_and_equal_rewards_have_advantage_zero():
    assert advantages([(1.0, "a", True), (0.0, "a", False), (1.0, "b", True), (0.0, "b", True)])[0] == 0
    # A third is not exact in floating point, and neither are mean and deviation of equal ones.
    np.testing.assert_array_equal(group_advantages([1 / 3] * 7, ["a"] * 7, [True] * 7), 0)


def test_a_reward_that_is_not_finite_is_refused_by_row():
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        group_advantages([0.0, math.nan], ["a", "a"], [True, True])


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
