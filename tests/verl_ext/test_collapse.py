"""Collapse metrics by hand and within their bounds, and when each alarm is raised."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.trainer.collapse import WINDOW, CollapseWatch, collapse_metrics, question_metrics
from verl_ext.trainer.step_rows import StepRow

WORDS = st.sampled_from(["who", "founded", "the", "town", "river", "7", ""])
QUESTIONS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=8)
ANSWERS = st.lists(st.sampled_from(["yes", "No.", "1999", "3,5 %", "Vell", "three", ""]), max_size=8)


def row(score, key="p_0_0", valid=True, hop=0, **reward):
    reward = {"score": score, "valid": valid, **reward}
    return StepRow(key, False, "search_zero", {"hop": hop}, reward, Trajectory((Turn("t"),)), 0)


def question(text, answer="Vell", **reward):
    parts = {"question": text, "answer": answer, "integrity": True, "format": 0.5, "difficulty": 0.25}
    return row(0.5, **parts | reward)


def collapse(rows, log_probs=None):
    metrics = collapse_metrics(rows, [r.prompt for r in rows], log_probs or [[-1.0]] * len(rows))
    return {name.removeprefix("drzero/collapse/"): value for name, value in metrics.items()}


def test_groups_without_variance_are_counted_among_those_with_several_rows():
    rows = [row(1.0, "a_0_0"), row(1.0, "a_1_0"), row(0.0, "b_0_0"), row(1.0, "b_1_0"), row(1.0, "c_0_0")]
    assert collapse(rows)["zero_variance_share"] == 0.5


def test_entropy_and_length_are_of_sampled_tokens_in_rows_that_count():
    good = [row(1.0, "a_0_0"), row(0.0, "a_1_0")]
    metrics = collapse(good, [[-1.0, -2.0], [-3.0, -4.0, -5.0, -6.0]])
    assert (metrics["entropy"], metrics["response_tokens"]) == (3.5, 3.0)
    spoiled = row(0.0, "a_2_0", valid=False)
    assert collapse([*good, spoiled], [[-1.0, -2.0], [-3.0, -4.0, -5.0, -6.0], [-9.0] * 50]) == metrics


def test_a_solvers_step_has_no_metrics_of_questions():
    of_any = {"zero_variance_share", "entropy", "response_tokens", "searched_share"}
    assert set(collapse([row(1.0)])) == of_any


def test_one_hop_rows_are_not_in_the_share_that_searches():
    searched = Trajectory((Turn("t", (SearchCall("r", ("q",), response="p"),)),))
    hops = [row(1.0, f"p_{hop}_0", hop=hop) for hop in (1, 1, 2, 3, 4)]
    hops[3] = replace(hops[3], trajectory=searched)
    assert collapse(hops)["searched_share"] == pytest.approx(1 / 3)
    assert "searched_share" not in collapse(hops[:2])


def test_question_metrics_are_as_computed_by_hand():
    metrics = question_metrics(["q"] * 5, ["Yes.", "no", "1999", "12 %", "the Vell"])
    assert (metrics["yes_no_share"], metrics["number_share"]) == (0.4, 0.4)
    metrics = question_metrics(["Who founded Orrin?", "who founded the Orrin", "Where is Vell"], [])
    # The first two are equal after normalization. The third shares no pair of words with them.
    assert metrics["self_similarity"] == pytest.approx(2 / 3)
    assert metrics["duplicate_share"] == pytest.approx(1 / 3)


def test_only_questions_with_integrity_are_measured():
    metrics = collapse([question("q", "yes"), question("r", "Vell", integrity=False, format=1.0)])
    assert (metrics["yes_no_share"], metrics["format"]) == (1.0, 0.5)


@given(QUESTIONS, ANSWERS)
def test_question_metrics_are_shares(questions, answers):
    assert all(0 <= value <= 1 for value in question_metrics(questions, answers).values())


@given(
    st.lists(st.tuples(st.floats(0, 1.5), st.sampled_from("ab"), st.booleans()), max_size=8),
    st.lists(st.floats(-9, 0), max_size=5),
)
def test_a_steps_metrics_are_in_bounds(rows, log_probs):
    made = [row(score, f"{prompt}_0_0", valid) for score, prompt, valid in rows]
    metrics = collapse(made, [log_probs] * len(made))
    assert 0 <= metrics["zero_variance_share"] <= 1
    assert metrics["entropy"] >= 0 and metrics["response_tokens"] >= 0


HEALTHY = {"zero_variance_share": 0.3, "entropy": 0.4, "response_tokens": 100.0, "searched_share": 0.6}
HEALTHY |= {"format": 0.7, "difficulty": 0.4, "yes_no_share": 0.1, "number_share": 0.2}
HEALTHY |= {"self_similarity": 0.3, "duplicate_share": 0.0}


def add_steps(watch, steps=WINDOW, **changes):
    """Alarms raised over some equal steps."""
    return add(watch, HEALTHY | changes, steps)


def add(watch, step, steps=WINDOW):
    metrics = {f"drzero/collapse/{name}": value for name, value in step.items()}
    return [str(alarm) for _ in range(steps) for alarm in watch.add_step(metrics)]


def name(alarm):
    found = re.match(r"collapse alarm \[([a-z-]+)\]: ", alarm)
    assert found
    return found[1]


ALARMS = [({"zero_variance_share": 0.9}, "zero-variance"), ({"entropy": 0.01}, "entropy")]
ALARMS += [({"response_tokens": 40.0}, "length"), ({"searched_share": 0.05}, "searching")]
ALARMS += [({"response_tokens": 250.0}, "length"), ({"format": 0.99, "difficulty": 0.1}, "format")]
ALARMS += [({"yes_no_share": 0.83}, "answer-types"), ({"number_share": 0.8}, "numbers")]
ALARMS += [({"self_similarity": 0.8}, "self-similarity"), ({"duplicate_share": 0.4}, "duplicates")]


@pytest.mark.parametrize(
    ("changes", "expected"), ALARMS, ids=lambda value: value if isinstance(value, str) else None
)
def test_an_alarm_is_raised_once_while_its_limit_is_crossed(changes, expected):
    watch = CollapseWatch()
    assert add_steps(watch) == []
    assert [name(alarm) for alarm in add_steps(watch, 3 * WINDOW, **changes)] == [expected]
    assert set(watch.active) == {expected}


def test_an_alarm_has_value_and_advice_and_is_raised_again_after_a_clear_window():
    watch = CollapseWatch()
    (alarm,), none, again = (add_steps(watch, yes_no_share=share) for share in (0.83, 0.1, 0.9))
    assert alarm.startswith("collapse alarm [answer-types]: 83 % of the answers are yes or no (limit 50 %): ")
    assert "read the questions in the rollout dumps" in alarm
    assert none == [] and len(again) == 1


WITHIN = {"format alone": {"format": 0.99}, "difficulty alone": {"difficulty": 0.1}}
WITHIN |= {"a little shorter": {"response_tokens": 60.0}, "low but alive": {"entropy": 0.06}}
WITHIN |= {"a tenth searches": {"searched_share": 0.1}}


@pytest.mark.parametrize("changes", WITHIN.values(), ids=WITHIN)
def test_metrics_within_the_limits_raise_no_alarm(changes):
    watch = CollapseWatch()
    add_steps(watch)
    assert add_steps(watch, 2 * WINDOW, **changes) == []


def test_no_alarm_is_raised_before_a_full_window_or_by_one_bad_step():
    watch = CollapseWatch()
    add_steps(watch, WINDOW - 1)
    assert not watch.window_full
    add_steps(watch, 1)
    assert watch.window_full
    assert add_steps(watch, 1, yes_no_share=1.0, duplicate_share=0.9) == []


def test_a_first_window_without_questions_does_not_measure_difficulty():
    watch = CollapseWatch()
    assert add(watch, {"zero_variance_share": 0.0, "entropy": 0.3, "response_tokens": 100.0}) == []
    assert add_steps(watch, 2 * WINDOW, format=0.99, difficulty=0.1, response_tokens=100.0) == []
