"""Stages launched by themselves, as a user types them who wants one more step, on a loop that has ended.

They run the same functions as `test_modal_loop.py`, and change the loop that others assert on: this file is
the last of its lane (`conftest.py`).
"""

from __future__ import annotations

import json

import pytest
from chaos import STEPS
from launched_loop import LaunchedLoop, launch_words
from modal_checkout import run_action
from modal_plane.client import Done
from stage_run import RUN_LIMIT_S

from drzero.recipe.metrics import read_metrics
from verl_ext.checkpoints import saved_step

pytestmark = [
    pytest.mark.timeout(4 * RUN_LIMIT_S),
    pytest.mark.slow("a second witness of stages that test_modal_loop.py runs; four minutes"),
    pytest.mark.matrix,
]

SOLVER = "solver_iter1"
ITERATION = {"synthesize": "1", "solver": "1", "merge": "1", "evaluate": "0"}
"""Of the stages that are typed by themselves."""


def of_stage(stage: str) -> list[str]:
    """The loop's words for a stage that is typed by itself."""
    words = [word.removeprefix(f"stages.{stage}.") for word in launch_words()]
    return [word for word in words if not word.startswith(("stages.", "iterations=", "keep_checkpoints="))]


@pytest.fixture(scope="module")
def by_itself(launched_loop: LaunchedLoop) -> dict[str, Done]:
    """Each later stage as an action of its own: one more step, and two more questions to the base model."""
    more = {"solver": [f"steps_per_iteration={STEPS + 1}"], "evaluate": ["--num-examples", "6"]}
    done = {}
    for stage in ITERATION:
        words = [word for word in of_stage(stage) if word.partition("=")[0] not in _keys(more.get(stage, []))]
        words = [*words, "--iteration", ITERATION[stage], *more.get(stage, [])]
        done[stage] = run_action(
            launched_loop.plane, launched_loop.checkout, stage, *words, seconds=RUN_LIMIT_S
        )
    return done


def _keys(words: list[str]) -> list[str]:
    flags = {"--num-examples": "questions_per_benchmark"}
    return [flags.get(word, word.partition("=")[0]) for word in words]


@pytest.mark.parametrize("stage", ITERATION)
def test_each_is_a_launch_that_ends_well(by_itself: dict[str, Done], stage: str) -> None:
    done = by_itself[stage]
    assert done.code == 0, done.stdout[-6000:] + done.stderr
    assert f"{stage}_iter{ITERATION[stage]} is finished" in done.stdout


def test_the_solver_has_one_more_step(launched_loop: LaunchedLoop, by_itself: dict[str, Done]) -> None:
    with_the_starts_validation = list(range(STEPS + 2))
    assert sorted(read_metrics(launched_loop.committed / SOLVER)) == with_the_starts_validation
    assert saved_step(launched_loop.committed / SOLVER) == STEPS + 1


def test_the_merged_model_is_that_steps(launched_loop: LaunchedLoop, by_itself: dict[str, Done]) -> None:
    report = json.loads((launched_loop.committed / "merge_iter1" / "report.json").read_text())
    assert f"global_step_{STEPS + 1}" in report["checkpoint"]


def test_the_evaluation_asked_only_for_what_was_missing(
    launched_loop: LaunchedLoop, by_itself: dict[str, Done]
) -> None:
    lines = (launched_loop.committed / "evaluate_iter0" / "answers.jsonl").read_text().splitlines()[1:]
    asked = [(answer["benchmark"], answer["id"]) for answer in map(json.loads, lines)]
    assert len(asked) == len(set(asked)) == 4 * 6
