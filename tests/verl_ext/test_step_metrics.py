"""A step's metrics by hand. Spoiled rows touch only the failures."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.trainer.step_metrics import (
    challenger_metrics,
    progress_line,
    rollout_metrics,
    solver_metrics,
    validation_line,
    validation_metrics,
)
from verl_ext.trainer.step_rows import StepRow

ANSWERED = SearchCall("r", ("q",), response="p")
INVALID = SearchCall("r", None, response="Error", error="not JSON")
FAILED = SearchCall("r", ("q",), response="Search is unavailable", failed=True, error="down")
ATTEMPTS = {"attempts_finished": 2, "attempts_failed": 0, "attempt_searches": 3, "attempt_tokens": 40}
ATTEMPTS |= {"attempt_tokens_in": 100}
NUMBER = count()


def row(hop=1, *calls, k=None, score=0.0, valid=True, padding=False, truncated=False, drift=0):
    reward = dict.fromkeys(("difficulty", "format", "think", "tool", "answer_part"), score / 2)
    reward |= {"score": score, "valid": valid, "integrity": k is not None, "n": 2, "k": k, "attempts_s": 1.0}
    reward["integrity_fault"] = "no_answer" if k is None else None
    reward["hop_fault"] = None if any(call.answered for call in calls) else "no search"
    if k is not None:
        reward |= ATTEMPTS
    turns = (*(Turn("t", (call,)) for call in calls), Turn("end", truncated=truncated))
    key = f"key_{next(NUMBER)}_0"
    return StepRow(key, padding, f"search_zero_{hop}", {"hop": hop}, reward, Trajectory(turns), drift)


STEP = [row(1, k=1, score=1.5), row(1, score=0.0, truncated=True)]
STEP += [row(2, ANSWERED, k=2, score=0.5), row(2, INVALID, k=0, score=0.5)]


def all_metrics(rows, expected=8):
    return rollout_metrics(rows, expected) | challenger_metrics(rows)


BY_HAND = [
    ("failures", {"rollouts_lost": 4, "rows_invalid": 0, "share": 0.5}),
    ("rollout", {"rows": 4, "turns": 1.5, "truncated_turns": 1, "tool_calls": 2, "tool_calls_invalid": 1}),
    ("rollout", {"searched_share": 0.25, "searched_share_multi_hop": 0.5, "token_drift_rate": 0}),
    ("reward", {"score": 0.625, "difficulty": 0.3125, "score_hop_1": 0.75, "score_hop_2": 0.5}),
    ("questions", {"valid_share": 0.75, "valid_share_hop_1": 0.5, "valid_share_hop_2": 1}),
    ("questions", {"no_answer": 1, "answer_in_question": 0, "hops_hold_share": 1 / 2}),
    ("solved", {"0_of_2": 1, "1_of_2": 1, "2_of_2": 1, "pass_rate": 0.5, "some": 1 / 3}),
    ("solver", {"attempts_finished": 6, "attempt_searches": 9, "attempt_tokens": 120}),
    ("solver", {"attempt_tokens_in": 300}),
    ("time", {"solver_attempts_mean_s": 1.0}),
]


@pytest.mark.parametrize(("group", "expected"), BY_HAND)
def test_a_steps_metrics_are_as_computed_by_hand(group, expected):
    metrics = all_metrics(STEP)
    assert {name: metrics[f"drzero/{group}/{name}"] for name in expected} == pytest.approx(expected)


def test_a_question_kept_from_the_solver_is_in_no_share_of_solved_ones():
    unasked = row(2, k=0, score=0.5)
    unasked.reward.update(k=None)
    with_it, without = all_metrics([*STEP, unasked]), all_metrics(STEP)
    assert {name for name in without if "solved/" in name and with_it[name] != without[name]} == set()
    assert with_it["drzero/questions/hops_hold_share"] == pytest.approx(1 / 3)


def test_a_one_hop_step_has_no_share_of_searches_for_more_hops():
    metrics = all_metrics([row(1, k=1, score=0.5), row(1, k=0, score=0.5)])
    assert metrics["drzero/rollout/rows_multi_hop"] == 0
    assert "drzero/rollout/searched_share_multi_hop" not in metrics


ROWS = st.builds(row, st.integers(1, 4), k=st.none() | st.integers(0, 2), score=st.floats(0, 1.5))


@given(st.lists(ROWS, min_size=1, max_size=6), st.lists(ROWS, max_size=4), st.randoms(use_true_random=False))
def test_padding_rows_influence_nothing(good, others, rng):
    padding = [row(r.hop, FAILED, k=r.reward["k"], score=9.0, padding=True, drift=1) for r in others]
    mixed = [*good, *padding]
    rng.shuffle(mixed)
    assert all_metrics(mixed) == pytest.approx(all_metrics(good))


@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_invalid_rows_influence_only_the_failures(good, bad, rng):
    mixed = [*good, *(row(2, FAILED, score=9.0, valid=False, truncated=True) for _ in range(bad))]
    rng.shuffle(mixed)
    with_bad, without = all_metrics(mixed, 10), all_metrics(good, 10)
    changed = {name for name in without if with_bad[name] != pytest.approx(without[name])}
    names = ("rows_invalid", "rollouts_lost", "searches")
    assert changed == {f"drzero/failures/{name}" for name in names}
    assert with_bad["drzero/failures/rows_invalid"] == with_bad["drzero/failures/searches"] == bad
    assert with_bad["drzero/failures/share"] == (10 - len(good)) / 10


def test_drift_is_counted_in_invalid_rows_too():
    metrics = rollout_metrics([*STEP, row(1, valid=False, drift=1)], 8)
    assert metrics["drzero/rollout/token_drift_rate"] == pytest.approx(1 / 5)


def answer(prompt, score, hop=0, text="x", valid=True):
    reward = {"score": score, "f1": (1 + score) / 2, "answer": text, "valid": valid}
    turns = Trajectory((Turn("t"),))
    return StepRow(f"{prompt}_0_0", False, "search_zero", {"hop": hop}, reward, turns, 0)


ANSWERS = [answer("a", 1.0, 1), answer("a", 0.0, 1), answer("a", 0.0, 1, valid=False)]
ANSWERS += [answer("b", 1.0, 2), answer("b", 1.0, 2), answer("c", 0.0, 2, None)]


def test_a_solvers_metrics_are_as_computed_by_hand():
    expected = {"em": 0.6, "f1": 0.8, "answered_share": 0.8, "groups_with_variance": 0.5}
    expected |= {"em_hop_1": 0.5, "em_hop_2": 2 / 3}
    metrics = solver_metrics(ANSWERS)
    assert metrics == pytest.approx({f"drzero/reward/{name}": value for name, value in expected.items()})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0]), st.booleans()), max_size=9))
def test_a_solvers_metrics_are_shares_and_invalid_rows_influence_none(rows):
    made = [answer(prompt, score, valid=valid) for prompt, score, valid in rows]
    metrics = solver_metrics(made)
    assert all(0 <= value <= 1 for value in metrics.values())
    assert metrics == solver_metrics([row for row in made if row.counts])


def test_a_validation_without_hops_has_no_metrics_by_hop():
    infos = {"score": [1.0, 0.0], "f1": [1.0, 0.0], "valid": [True, True], "hop": [0, 0]}
    names = {f"drzero/val/{name}" for name in ("em", "f1", "rows", "failed")}
    assert set(validation_metrics(infos, 2)) == names


@pytest.mark.parametrize("infos", [{}, {"score": [0.0], "f1": [0.0], "valid": [False], "hop": [1]}])
def test_a_validation_of_failures_alone_has_no_score(infos):
    assert validation_metrics(infos, 3) == {"drzero/val/rows": 0, "drzero/val/failed": 3}


def test_a_validation_and_a_step_are_each_one_line():
    line = validation_line({"drzero/val/em": 0.25, "drzero/val/rows": 40.0, "drzero/val/failed": 1.0}, 6)
    assert line == "validation after step 6: exact match 0.25, questions 40, failed 1"
    line = progress_line({"drzero/reward/score": 0.5, "timing_s/step": 12.0}, 2, 6)
    assert line == "step 2/6: reward 0.50, seconds 12.00"
