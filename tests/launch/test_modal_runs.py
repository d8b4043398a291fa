"""Real stages through the launcher: Modal's client and container, our functions, a tiny model.

One run continues from launch to launch: it is prepared, cut by the end of a call, killed during a write, and
stopped by its budget.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from data_order import unbroken_order
from modal_checkout import run_action, stage_plane, start_action
from modal_plane import ControlPlane
from modal_plane.client import Done
from modal_plane.state import Call
from omegaconf import DictConfig, OmegaConf
from stage_run import RUN_LIMIT_S, Run, dumped_order
from watch import Watch

from data.demo_world import generate_world, write_world
from drzero.launch.container import MARGIN_S
from drzero.recipe.metrics import read_metrics
from verl_ext.checkpoints import saved_step

# `launched_loop` runs every stage this way once; test_challenger.py cuts and resumes a run.
pytestmark = [
    pytest.mark.timeout(4 * RUN_LIMIT_S),
    pytest.mark.slow("four more starts of the trainer"),
    # It counts on a start that takes less than ONE_STEP_S: not so on a machine that does other work.
    pytest.mark.matrix,
]

RUN = "challenger_iter1"
ONE_STEP_S = 160
"""Enough for a start and one step, too little for another step and its save (120 s before one is timed)."""
TINY = [
    *("--gpu-count", "0", "--model", "demo-policy", "base_model=${paths.corpus}/models/tiny"),
    "data.train_batch_size=8",
    # No save is due but the last step's: the others are those of a run that is cut.
    *("trainer.save_freq=10", "actor_rollout_ref.actor.optim.lr=1e-3", "process_env.OMP_NUM_THREADS=1"),
]


@dataclass
class Cut:
    """A launch of several calls, and the step that was committed when a container of it was killed."""

    done: Done
    committed_when_killed: int


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with stage_plane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest.fixture(scope="module")
def uploaded(plane, checkout, speaking_model, tmp_path_factory):
    world = tmp_path_factory.mktemp("world")
    write_world(generate_world(0, "run", passages=60), world)
    for words in ([str(world / "corpus.jsonl")], [str(speaking_model), "models/tiny"]):
        run_action(plane, checkout, "upload", *words).succeeded()


@pytest.fixture(scope="module")
def prepared(plane, checkout, uploaded):
    sizes = ["rows=60", "heldout_rows=0", "source=${paths.corpus}/corpus.jsonl"]
    model = ["--model", "demo-policy", "base_model=${paths.corpus}/models/tiny"]
    run_action(plane, checkout, "prepare-data", *model, *sizes, seconds=RUN_LIMIT_S).succeeded()


@pytest.fixture(scope="module")
def cut(plane, checkout, prepared):
    timeout = f"compute.timeout={MARGIN_S + ONE_STEP_S:.0f}"
    words = ["challenger", *TINY, "trainer.total_training_steps=2", timeout]
    client = start_action(plane, checkout, *words)
    volume = plane.volume("dr-zero-checkpoints")
    torn = volume.folder / RUN / "global_step_2" / "actor"

    def is_saving() -> bool:
        return client.has_ended or (torn.is_dir() and any(torn.iterdir()))

    plane.wait_for(is_saving, "a save of step 2", RUN_LIMIT_S)
    plane.kill(parts(plane)[-1])
    committed = saved_step(volume.committed() / RUN)
    return Cut(client.wait(RUN_LIMIT_S), committed)


@pytest.fixture(scope="module")
def out_of_money(plane, checkout, cut):
    spent = sum(usd(call) for call in calls_paid(plane))
    rate = calls_paid(plane)[0]["usd_per_hour"]
    limit = spent + rate * (MARGIN_S + ONE_STEP_S) / 3600
    words = ["challenger", *TINY, "trainer.total_training_steps=4", f"compute.max_usd={limit:.6f}"]
    # The estimate of two steps is for larger machines' starts; the point here is what happens at the limit.
    return run_action(plane, checkout, *words, seconds=RUN_LIMIT_S), calls_paid(plane)


def parts(plane: ControlPlane) -> list[Call]:
    """The calls of the first challenger launch."""
    calls = [call for call in plane.calls if call.function == "cpu_stage" and call.args[0].name == RUN]
    return [call for call in calls if call.args[0].id == calls[0].args[0].id]


def run_folder(plane: ControlPlane) -> Path:
    return plane.volume("dr-zero-checkpoints").committed() / RUN


def launch_file(plane: ControlPlane, name: str) -> Path:
    return plane.volume("dr-zero-checkpoints").committed() / "launches" / RUN / name


def calls_paid(plane: ControlPlane) -> list[dict[str, Any]]:
    paid: list[dict[str, Any]] = json.loads(launch_file(plane, "spend.json").read_text())
    return paid


def usd(call: dict[str, Any]) -> float:
    return float((call["until"] - call["began"]) / 3600 * call["usd_per_hour"])


class TestCutAndContinued:
    def test_the_run_is_finished_by_a_second_call_of_the_same_function(self, plane, cut):
        cut.done.succeeded()
        # A slow machine may need a third.
        *others, last = parts(plane)
        assert [part.result["state"] for part in (*others, last)] == [*["continue"] * len(others), "finished"]
        assert others
        for before, after in pairwise([*others, last]):
            assert after.parent == before.id
            assert (after.spec.timeout, after.spec.cpu) == (before.spec.timeout, before.spec.cpu)

    def test_it_has_the_steps_and_data_of_an_uninterrupted_one(self, plane, cut):
        config = OmegaConf.load(run_folder(plane) / "resolved.yaml")
        assert isinstance(config, DictConfig)
        run = Run(0, "", "", run_folder(plane), Watch())
        assert dumped_order(run, [1, 2]) == unbroken_order(config, 2)
        assert len(read_metrics(run.folder)) == 2

    def test_its_cost_is_that_of_every_container(self, plane, cut):
        paid = calls_paid(plane)
        started = [number for number, part in enumerate(parts(plane)) for _ in range(part.attempts)]
        assert [call["part"] for call in paid] == started
        assert f"it cost ${sum(usd(call) for call in paid):.2f}" in cut.done.stdout

    def test_every_checkpoint_was_committed_as_it_came(self, plane, cut):
        first = parts(plane)[0]
        commits = plane.volume("dr-zero-checkpoints").commits
        mine = [commit for commit in commits if commit.call_id == first.id and not commit.at_exit]
        # At the start, for a dump or a checkpoint at least, at the end.
        assert len(mine) >= 3


class TestKilledInAWrite:
    def test_what_was_committed_is_usable(self, cut):
        assert cut.committed_when_killed == 1

    def test_the_next_container_resumes_from_there(self, plane, cut):
        assert saved_step(run_folder(plane)) == 2
        assert sum(part.attempts for part in parts(plane)) == len(parts(plane)) + 1


class TestOutOfMoney:
    def test_it_stops_at_a_complete_checkpoint_and_prints_what_to_raise(self, plane, out_of_money):
        done, _ = out_of_money
        assert done.code == 1
        assert "raise compute.max_usd and launch it again" in done.stdout
        assert saved_step(run_folder(plane)) == 3

    def test_what_was_spent_is_within_the_limit(self, out_of_money):
        done, paid = out_of_money
        limit = float(done.stdout.split("max_usd: ")[1].split()[0])
        assert sum(usd(call) for call in paid) <= limit


class TestAfterwards:
    def test_status_has_state_and_cost_of_the_launch(self, plane, checkout, out_of_money):
        done = run_action(plane, checkout, "status").succeeded()
        (line,) = [line for line in done.stdout.splitlines() if RUN in line]
        assert "out of money" in line

    def test_diagnose_reads_the_run(self, plane, checkout, out_of_money):
        done = run_action(plane, checkout, "diagnose", RUN).succeeded()
        assert "out of time" in done.stdout
