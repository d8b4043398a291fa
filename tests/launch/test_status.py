"""The line that a launch logs every minute: step, scores, time and cost."""

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from drzero.launch.arguments import parse
from drzero.launch.request import Request, resolve
from drzero.launch.status import status_line
from drzero.ops.process.logs import EventLog
from verl_ext.checkpoints import TRACKER

TRAINED = {"training/global_step": 12, "drzero/reward/score": 0.5432}


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("DRZERO_MOUNT_CHECKPOINTS", str(tmp_path))
    return tmp_path


def request_of(action: str, max_usd: float | None = 130.0) -> Request:
    request = resolve(parse(["--action", action]))
    return dataclasses.replace(request, compute=dataclasses.replace(request.compute, max_usd=max_usd))


def trained(run: Path, steps: int, saved: int, at: float = 0.0) -> None:
    """A run's folder with metrics of so many steps, last written to at that time."""
    (run / "metrics").mkdir(parents=True)
    lines = [json.dumps({"step": step, "data": TRAINED}) for step in range(1, steps + 1)]
    (run / "metrics" / "attempt_001.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if saved:
        (run / TRACKER).write_text(str(saved))
    os.utime(run / "metrics", (at, at))


def test_it_has_step_reward_checkpoint_time_and_cost_against_the_limit(checkpoints):
    trained(checkpoints / "challenger_iter1", steps=12, saved=10)
    assert status_line(request_of("challenger"), 13.2, 3900) == (
        "challenger_iter1: step 12, reward 0.543, checkpoint of step 10, 1 h 05 min, $13.20 of $130.00"
    )


def test_before_the_first_step_it_says_so(checkpoints):
    trained(checkpoints / "challenger_iter1", steps=0, saved=0)
    assert status_line(request_of("challenger"), 0.5, 60).startswith("challenger_iter1: no step yet, 1 min")
    log = EventLog(checkpoints / "challenger_iter1" / "logs" / "events.jsonl")
    log.add("start", "trainer", "starting")
    for text in ("loads the trained model's weights", "captures CUDA graphs"):
        log.add("startup", "trainer", text)
    assert status_line(request_of("challenger"), 0.5, 60).startswith(
        "challenger_iter1: no step yet, captures CUDA graphs, 1 min"
    )


def test_a_stage_without_steps_has_time_and_cost(checkpoints):
    assert status_line(request_of("evaluate"), 1.0, 120) == "evaluate_iter1, 2 min, $1.00 of $130.00"


def test_a_loops_line_is_of_the_run_that_was_written_to_last(checkpoints):
    trained(checkpoints / "challenger_iter1", steps=50, saved=50, at=100)
    trained(checkpoints / "solver_iter1", steps=3, saved=0, at=200)
    assert status_line(request_of("evolve"), 1.0, 60).startswith("solver_iter1: step 3")


def stalled(run: Path, *kinds: str, at: float) -> None:
    """A run's folder with these events in its last start."""
    (run / "logs").mkdir(parents=True)
    events = [{"kind": "start", "component": "trainer", "offset": 0, "text": "", "time": at}]
    for kind in kinds:
        told = {"text": "rank 1 is late", "component": "rank 1", "advice": "see it", "report": "stall_001.md"}
        events.append({"kind": kind, "time": at, **told})
    (run / "logs" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("stall",), "stalled: rank 1 is late (culprit: rank 1), 1 min"),
        (("stall", "end", "start"), "1 stalls so far, the last: rank 1 is late (culprit: rank 1), 1 min"),
        (("stall", "progress"), "1 stalls so far, the last: rank 1 is late (culprit: rank 1), 1 min"),
    ],
)
def test_a_stall_of_the_call_is_in_it_and_whether_it_lasts(checkpoints, kinds, said):
    stalled(checkpoints / "solver_iter1", *kinds, at=time.time())
    for action in ("solver", "evolve"):
        assert said in status_line(request_of(action), 1.0, 60)


def test_a_stall_of_an_earlier_call_is_not(checkpoints):
    stalled(checkpoints / "solver_iter1", "stall", at=time.time() - 900)
    assert "stall" not in status_line(request_of("solver"), 1.0, 60)


def test_without_a_limit_only_the_cost_is_shown(checkpoints):
    assert status_line(request_of("evaluate", max_usd=None), 1.0, 60).endswith(", $1.00")
