"""A step's metrics on rows made by hand: figures by hand, and spoiled rows touch none but the failures."""

from itertools import count
from typing import Any

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


def row(
    hop: int = 1,
    *calls: SearchCall,
    k: int | None = None,
    score: float = 0.0,
    valid: bool = True,
    padding: bool = False,
    truncated: bool = False,
    drift: int = 0,
) -> StepRow:
    reward: dict[str, Any] = dict.fromkeys(
        ("difficulty", "format", "think", "tool", "answer_part"), score / 2
    )
    reward |= {"score": score, "valid": valid, "integrity": k is not None, "n": 2, "k": k, "attempts_s": 1.0}
    reward["integrity_fault"] = "no_answer" if k is None else None
    reward["hop_fault"] = None if any(call.answered for call in calls) else "no search"
    if k is not None:
        reward |= ATTEMPTS
    turns = (*(Turn("t", (call,)) for call in calls), Turn("end", truncated=truncated))
    key = f"key_{next(NUMBER)}_0"
    return StepRow(key, padding, f"search_zero_{hop}", {"hop": hop}, reward, Trajectory(turns), drift)


STEP = [
    row(1, k=1, score=1.5),
    row(1, score=0.0, truncated=True),
    row(2, ANSWERED, k=2, score=0.5),
    row(2, INVALID, k=0, score=0.5),
]


def all_metrics(rows: list[StepRow], expected: int = 8) -> dict[str, float]:
    return rollout_metrics(rows, expected) | challenger_metrics(rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failures/rollouts_lost", 4),
        ("failures/rows_invalid", 0),
        ("failures/share", 0.5),
        ("rollout/rows", 4),
        ("rollout/turns", 1.5),
        ("rollout/truncated_turns", 1),
        ("rollout/tool_calls", 2),
        ("rollout/tool_calls_invalid", 1),
        ("rollout/searched_share", 0.25),
        ("rollout/searched_share_multi_hop", 0.5),
        ("rollout/token_drift_rate", 0),
        ("reward/score", 0.625),
        ("reward/difficulty", 0.3125),
        ("reward/score_hop_1", 0.75),
        ("reward/score_hop_2", 0.5),
        ("questions/valid_share", 0.75),
        ("questions/no_answer", 1),
        ("questions/answer_in_question", 0),
        ("questions/valid_share_hop_1", 0.5),
        ("questions/valid_share_hop_2", 1),
        ("solved/0_of_2", 1),
        ("solved/1_of_2", 1),
        ("solved/2_of_2", 1),
        ("solved/pass_rate", 0.5),
        ("solved/some", 1 / 3),
        ("questions/hops_hold_share", 1 / 2),
        ("solver/attempts_finished", 6),
        ("solver/attempt_searches", 9),
        ("solver/attempt_tokens", 120),
        ("solver/attempt_tokens_in", 300),
        ("time/solver_attempts_mean_s", 1.0),
    ],
)
def test_a_metric_of_the_step_by_hand(name: str, value: float) -> None:
    assert all_metrics(STEP)[f"drzero/{name}"] == pytest.approx(value)


def test_a_question_that_a_hop_check_kept_from_the_solver_is_in_no_share_of_solved_ones() -> None:
    unasked = row(2, k=0, score=0.5)
    unasked.reward.update(k=None)
    with_it, without = all_metrics([*STEP, unasked]), all_metrics(STEP)
    assert {name for name in without if "solved/" in name and with_it[name] != without[name]} == set()
    assert with_it["drzero/questions/hops_hold_share"] == pytest.approx(1 / 3)


def test_a_step_of_one_hop_alone_has_no_share_of_more_hops_that_search() -> None:
    metrics = all_metrics([row(1, k=1, score=0.5), row(1, k=0, score=0.5)])
    assert metrics["drzero/rollout/rows_multi_hop"] == 0
    assert "drzero/rollout/searched_share_multi_hop" not in metrics


ROWS = st.builds(
    row,
    st.integers(1, 4),
    k=st.none() | st.integers(0, 2),
    score=st.floats(0, 1.5),
    drift=st.just(0),
)


@given(st.lists(ROWS, min_size=1, max_size=6), st.lists(ROWS, max_size=4), st.randoms(use_true_random=False))
def test_padding_rows_influence_nothing(good: list[StepRow], others: list[StepRow], rng: Any) -> None:
    padding = [row(r.hop, FAILED, k=r.reward["k"], score=9.0, padding=True, drift=1) for r in others]
    mixed = [*good, *padding]
    rng.shuffle(mixed)
    assert all_metrics(mixed) == pytest.approx(all_metrics(good))


@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_invalid_rows_influence_nothing_but_the_failures(good: list[StepRow], bad: int, rng: Any) -> None:
    mixed = [*good, *(row(2, FAILED, score=9.0, valid=False, truncated=True) for _ in range(bad))]
    rng.shuffle(mixed)
    with_bad, without = all_metrics(mixed, 10), all_metrics(good, 10)
    changed = {name for name in without if with_bad[name] != pytest.approx(without[name])}
    assert changed == {
        "drzero/failures/rows_invalid",
        "drzero/failures/rollouts_lost",
        "drzero/failures/searches",
    }
    assert with_bad["drzero/failures/rows_invalid"] == with_bad["drzero/failures/searches"] == bad
    assert with_bad["drzero/failures/share"] == (10 - len(good)) / 10


def test_drift_is_counted_in_every_real_row_even_an_invalid_one() -> None:
    metrics = rollout_metrics([*STEP, row(1, valid=False, drift=1)], 8)
    assert metrics["drzero/rollout/token_drift_rate"] == pytest.approx(1 / 5)


def test_a_step_of_failures_alone_still_has_metrics() -> None:
    metrics = all_metrics([row(2, FAILED, valid=False)], 2)
    assert metrics["drzero/failures/share"] == 1.0
    assert metrics["drzero/rollout/rows"] == metrics["drzero/reward/score"] == 0.0


def answer(prompt: str, score: float, hop: int = 0, text: str | None = "x", valid: bool = True) -> StepRow:
    reward = {"score": score, "f1": (1 + score) / 2, "answer": text, "valid": valid}
    turns = Trajectory((Turn("t"),))
    return StepRow(f"{prompt}_0_0", False, "search_zero", {"hop": hop}, reward, turns, 0)


ANSWERS = [
    answer("a", 1.0, 1),
    answer("a", 0.0, 1),
    answer("a", 0.0, 1, valid=False),
    answer("b", 1.0, 2),
    answer("b", 1.0, 2),
    answer("c", 0.0, 2, None),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("em", 0.6),
        ("f1", 0.8),
        ("answered_share", 0.8),
        ("groups_with_variance", 0.5),
        ("em_hop_1", 0.5),
        ("em_hop_2", 2 / 3),
    ],
)
def test_a_metric_of_a_solvers_step_by_hand(name: str, value: float) -> None:
    assert solver_metrics(ANSWERS)[f"drzero/reward/{name}"] == pytest.approx(value)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0]), st.booleans()), max_size=9))
def test_a_solvers_metrics_are_shares_and_invalid_rows_influence_none(rows: Any) -> None:
    made = [answer(prompt, score, valid=valid) for prompt, score, valid in rows]
    metrics = solver_metrics(made)
    assert all(0 <= value <= 1 for value in metrics.values())
    assert metrics == solver_metrics([row for row in made if row.counts])


def test_a_validation_without_hops_has_no_metrics_by_hop() -> None:
    infos = {"score": [1.0, 0.0], "f1": [1.0, 0.0], "valid": [True, True], "hop": [0, 0]}
    assert set(validation_metrics(infos, 2)) == {
        f"drzero/val/{name}" for name in ("em", "f1", "rows", "failed")
    }


@pytest.mark.parametrize("infos", [{}, {"score": [0.0], "f1": [0.0], "valid": [False], "hop": [1]}])
def test_a_validation_of_failures_alone_has_no_score(infos: dict[str, list[Any]]) -> None:
    assert validation_metrics(infos, 3) == {"drzero/val/rows": 0, "drzero/val/failed": 3}


def test_a_validation_is_one_line() -> None:
    line = validation_line({"drzero/val/em": 0.25, "drzero/val/rows": 40.0, "drzero/val/failed": 1.0}, 6)
    assert line == "validation after step 6: exact match 0.25, questions 40, failed 1"


def test_the_progress_line_has_the_metrics_that_exist() -> None:
    line = progress_line({"drzero/reward/score": 0.5, "timing_s/step": 12.0}, 2, 6)
    assert line == "step 2/6: reward 0.50, seconds 12.00"
