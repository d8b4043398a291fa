"""An environment's rows in the trainer: metrics by hand, branches of a rollout, and failures."""

import json
import math
from dataclasses import replace

import pytest

from drzero.recipe.metrics import columns_of
from environments.call import Call
from environments.conversation import Conversation, Turn, user_message
from verl_ext.trainer.collapse import collapse_metrics
from verl_ext.trainer.step_metrics import (
    environment_metrics,
    environment_validation,
    progress_line,
    rollout_metrics,
    validation_line,
)
from verl_ext.trainer.step_rows import StepRow, dump_rows

INVENTED = Call("raw", "fly", {}, "there is no tool 'fly'; the tools are walk", undeclared=True)


def row(key, score, success=False, **parts):
    """One branch of a rollout, spoiled by its environment if it has no score."""
    valid, said = score is not None, "sums: Episode.respond raised KeyError: 'a'"
    reward = {"score": score or 0.0, "filter_score": score if valid else math.nan, "parts": json.dumps(parts)}
    reward |= {"valid": valid, "reason_invalid": None if valid else said, "success": success}
    reward |= {"ended": "over", "undeclared_calls": 1}
    turn = Turn("text", (INVENTED,), False, (user_message("next"),))
    return StepRow(key, False, "sums", {"row": "train-1"}, reward, Conversation((), (turn,)), 0)


# The last but one is a second branch of the rollout before it.
STEP = [row("p_0_0", 1.0, True, exact=1.0), row("p_1_0", 0.0, exact=0.0, near=0.4)]
STEP += [row("q_0_0", 0.5, exact=0.5), row("q_0_1", 0.5, exact=0.5), row("q_1_0", None)]


def test_a_steps_metrics_are_as_computed_by_hand():
    expected = {"reward/score": 0.5, "reward/success": 1 / 3, "reward/part/exact": 0.5}
    expected |= {"reward/part/near": 0.4}  # one episode has it
    expected |= {"reward/groups_with_variance": 1.0}  # q has only one rollout that counts
    expected |= {"environment/undeclared_calls": 3, "environment/cut_off_share": 0.0}
    metrics = environment_metrics(STEP)
    assert {name: metrics[f"drzero/{name}"] for name in expected} == pytest.approx(expected)
    assert "reward 0.50, solved tasks 0.33" in progress_line(metrics, 1, 2)


def agent_row(key, calls, own, faults=(), score=1.0):
    told = {"calls": [{}] * calls, "places": {n: [0, 1] for n in range(own)}, "faults": list(faults)}
    return replace(row(key, score), agent=told)


def test_an_agents_rows_calls_and_failed_tries_are_counted_by_episode():
    raised, late = {"name": "raised"}, {"name": "timed_out"}
    step = [agent_row("p_0_0", 5, 3), agent_row("p_0_1", 5, 1), agent_row("p_0_2", 5, 1)]
    step += [agent_row("p_1_0", 1, 1, [raised]), agent_row("q_0_0", 9, 9, [raised, late], None)]
    metrics = environment_metrics(step)
    expected = {"agent/rows": 2.0, "agent/calls": 3.0, "agent/own_row_share": 0.5, "agent/begun_again": 2}
    expected |= {"failures/agent/raised": 2, "failures/agent/timed_out": 1}
    assert {name: metrics[f"drzero/{name}"] for name in expected} == expected
    assert "raised 2, timed out 1" in progress_line(metrics, 1, 2)
    assert list(columns_of("environment", {1: metrics}))[2:5] == ["calls", "rows", "begun\nagain"]
    # The turn that two rows have is one call's.
    assert (
        rollout_metrics([agent_row("p_0_0", 1, 1), agent_row("p_0_1", 1, 0)], 1)["drzero/rollout/tool_calls"]
        == 1
    )


def test_failures_are_counted_in_rollouts_and_not_in_means():
    metrics = rollout_metrics(STEP, expected=5)
    expected = {"rollouts_lost": 1, "rows_invalid": 1, "share": 2 / 5}
    assert {name: metrics[f"drzero/failures/{name}"] for name in expected} == expected
    assert metrics["drzero/rollout/rows"] == 4 and metrics["drzero/rollout/tool_calls_invalid"] == 4


def test_without_search_no_alarm_is_about_it():
    metrics = collapse_metrics(STEP, [each.prompt for each in STEP], [[-1.0]] * len(STEP))
    assert "drzero/collapse/searched_share" not in metrics
    # Of q only one rollout counts, and its two branches are not compared with each other.
    assert metrics["drzero/collapse/zero_variance_share"] == 0.0
    assert metrics["drzero/collapse/response_tokens"] == pytest.approx(4 / 3)


def test_a_dump_has_parts_and_observations(tmp_path):
    dump_rows(STEP, 3, tmp_path / "step_0003.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "step_0003.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == sorted(each.key for each in STEP)
    first, spoiled = lines[0], lines[-1]
    assert (first["question"], first["reward"]["parts"]) == ("train-1", {"exact": 1.0})
    (turn,) = first["trajectory"]["turns"]
    assert turn["observation"] == "next" and turn["calls"][0]["undeclared"]
    assert not spoiled["reward"]["valid"] and "KeyError" in spoiled["reward"]["reason_invalid"]


def test_a_validation_leaves_out_failures():
    good = [each for each in STEP if each.key.endswith("_0")]
    infos = {name: [each.reward[name] for each in good] for name in good[0].reward}
    metrics = environment_validation(infos, expected=5)
    expected = {"rows": 3, "failed": 2, "success": pytest.approx(1 / 3), "score": 0.5}
    assert {name: metrics[f"drzero/val/{name}"] for name in expected} == expected
    assert metrics["drzero/val/part/exact"] == 0.5
    assert "solved tasks 0.33, reward 0.50, questions 3, failed 2" in validation_line(metrics, 4)
