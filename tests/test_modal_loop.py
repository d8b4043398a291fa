"""The loop through the launcher, for real: every stage in Modal's container, one taken away in the middle.

First `evolve` as one launch, whose container is preempted while samples are drawn. Then the stages by
themselves, as somebody types them who wants one more step: each goes on from what the volume holds. They are
the same bodies once more, and take four minutes more, so they are asked for: `make test-modal`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos import SAMPLES, STEPS, Loop, problems, small_loop
from conftest import Prepared
from modal_checkout import make_checkout, run_action, stage_plane, start_action
from modal_plane import ControlPlane
from modal_plane.client import Done
from modal_plane.state import Call
from stage_run import RUN_LIMIT_S

from pipeline.summary import read_metrics
from verl_ext.checkpoints import saved_step

pytestmark = pytest.mark.timeout(4 * RUN_LIMIT_S)

CHECKPOINTS = "dr-zero-checkpoints"
CUT, SOLVER = "synthesize_iter1", "solver_iter1"
ITERATION = {"synthesize": "1", "solver": "1", "merge": "1", "evaluate": "0"}
"""Of the stages that are typed by themselves."""


@dataclass
class Evolved:
    """A loop whose container was taken away in the middle of a stage, and which has then finished."""

    done: Done
    call: Call


def overrides() -> list[str]:
    """Those of the small loop, with the model on the volume; the machine says the rest."""
    own = ("hardware=", "model=", "base_model=", "paths.")
    small = [word for word in small_loop(Path(), Path(), Path()) if not word.startswith(own)]
    return ["--gpu-count", "0", "base_model=${paths.corpus}/models/tiny", *small]


def of_stage(stage: str) -> list[str]:
    """The same for a stage that is typed by itself."""
    words = [word.removeprefix(f"stages.{stage}.") for word in overrides()]
    return [word for word in words if not word.startswith(("stages.", "iterations=", "keep_checkpoints="))]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with stage_plane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=False)


@pytest.fixture(scope="module")
def evolved(plane: ControlPlane, checkout: Path, prepared: Prepared, speaking_model: Path) -> Evolved:
    """Corpus, index and prompts made elsewhere and sent as folders; one iteration on them."""
    for source, target in ((prepared.corpus, "/"), (speaking_model, "models/tiny")):
        sent = run_action(plane, checkout, "upload", str(source), target)
        assert sent.code == 0, sent.stdout + sent.stderr
    client = start_action(plane, checkout, "evolve", *overrides())
    journal = plane.volume(CHECKPOINTS).folder / CUT / "samples.jsonl"

    def some_are_drawn() -> bool:
        return client.has_ended or (journal.is_file() and journal.read_bytes().count(b"\n") > 4 * SAMPLES)

    plane.wait_for(some_are_drawn, "samples", 2 * RUN_LIMIT_S)
    call = stage_calls(plane)[-1]
    plane.preempt(call)
    return Evolved(client.wait(2 * RUN_LIMIT_S), call)


@pytest.fixture(scope="module")
def by_itself(plane: ControlPlane, checkout: Path, evolved: Evolved) -> dict[str, Done]:
    """Each later stage as an action of its own: one more step, and two more questions to the base model."""
    more = {"solver": [f"steps_per_iteration={STEPS + 1}"], "evaluate": ["--num-examples", "6"]}
    done = {}
    for stage in ITERATION:
        words = [word for word in of_stage(stage) if word.partition("=")[0] not in _keys(more.get(stage, []))]
        words = [*words, "--iteration", ITERATION[stage], *more.get(stage, [])]
        done[stage] = run_action(plane, checkout, stage, *words, seconds=RUN_LIMIT_S)
    return done


def _keys(words: list[str]) -> list[str]:
    flags = {"--num-examples": "questions_per_benchmark"}
    return [flags.get(word, word.partition("=")[0]) for word in words]


def stage_calls(plane: ControlPlane) -> list[Call]:
    return [call for call in plane.calls if call.function == "cpu_stage"]


def kept(plane: ControlPlane) -> Path:
    """The checkpoints volume as the last container that committed has left it."""
    return plane.volume(CHECKPOINTS).committed()


def manifest(plane: ControlPlane) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((kept(plane) / "evolve" / "manifest.json").read_text())["stages"]
    return stages


class TestEvolve:
    def test_the_loop_is_finished_in_spite_of_a_preemption(self, evolved: Evolved) -> None:
        assert evolved.done.code == 0, evolved.done.stdout[-6000:] + evolved.done.stderr
        assert "evolve is finished" in evolved.done.stdout
        assert evolved.call.attempts == 2

    def test_only_the_stage_that_was_cut_was_started_twice(
        self, plane: ControlPlane, evolved: Evolved
    ) -> None:
        starts = {name: entry["starts"] for name, entry in manifest(plane).items()}
        assert starts.pop(CUT) == 2
        assert set(starts.values()) == {1} and len(starts) == 5

    def test_nothing_was_drawn_twice_or_left_half_written(
        self, plane: ControlPlane, evolved: Evolved
    ) -> None:
        assert problems(Loop([], kept(plane)), []) == []

    def test_scores_of_base_and_iteration_are_shown_here(self, evolved: Evolved) -> None:
        shown = evolved.done.stdout.rpartition("exact match, 95 % interval")[2]
        assert "base" in shown and "iteration 1" in shown

    def test_both_containers_are_paid_for(self, plane: ControlPlane, evolved: Evolved) -> None:
        paid = json.loads((kept(plane) / "launches" / "evolve" / "spend.json").read_text())
        assert [call["part"] for call in paid] == [0, 0]
        assert paid[0]["until"] <= paid[1]["began"]


@pytest.mark.skipif("DRZERO_TEST_MODAL" not in os.environ, reason="four minutes more: make test-modal")
class TestStagesByThemselves:
    @pytest.mark.parametrize("stage", ITERATION)
    def test_each_is_a_launch_that_ends_well(self, by_itself: dict[str, Done], stage: str) -> None:
        done = by_itself[stage]
        assert done.code == 0, done.stdout[-6000:] + done.stderr
        assert f"{stage}_iter{ITERATION[stage]} is finished" in done.stdout

    def test_the_solver_has_one_more_step(self, plane: ControlPlane, by_itself: dict[str, Done]) -> None:
        with_the_starts_validation = list(range(STEPS + 2))
        assert sorted(read_metrics(kept(plane) / SOLVER)) == with_the_starts_validation
        assert saved_step(kept(plane) / SOLVER) == STEPS + 1

    def test_the_merged_model_is_that_steps(self, plane: ControlPlane, by_itself: dict[str, Done]) -> None:
        report = json.loads((kept(plane) / "merge_iter1" / "report.json").read_text())
        assert f"global_step_{STEPS + 1}" in report["checkpoint"]

    def test_the_evaluation_asked_only_for_what_was_missing(
        self, plane: ControlPlane, by_itself: dict[str, Done]
    ) -> None:
        lines = (kept(plane) / "evaluate_iter0" / "answers.jsonl").read_text().splitlines()[1:]
        asked = [(answer["benchmark"], answer["id"]) for answer in map(json.loads, lines)]
        assert len(asked) == len(set(asked)) == 4 * 6
