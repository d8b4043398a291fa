"""The flow-test: samples through veRL's own trainer, queue and buffer, and what is found of a fault."""

import io
import json
import os
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig
from watch import Watch

from drzero.cli import main
from drzero.labs.flow_speed import BUSY, MARGIN, Need, full_speed, judge, needed
from drzero.labs.flow_test import SPEED_FILE, fit_to_mode, flow_test_overrides, run_flow_test
from drzero.ops.process.logs import read_json_lines
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import OverrideError
from drzero.recipe.settings.schema import schema_of
from drzero.stages.flow import CALLS, COUNTERS_FILE, flow_monitor
from drzero.stages.watch import WAITS_ON
from verl_ext.trainer import flow_counters, flow_load, flow_speed

NEED = Need("solver", 8, 5, 512, 512, step_s=20.0, source="assumed: no earlier run")
"""2 rows a second."""
SPEED = {
    **{"rows": 400, "prompts": 8, "rollouts": 5, "row_bytes": 40_000, "row_tokens": 1024},
    **{"in": 100.0, "out": 90.0, "in_alone": 250.0, "out_alone": 120.0, "put_s": 0.01, "take_s": 0.4},
    "busy": {"controller": 0.3, "storage": 0.2, "consumer": 0.4, "producer": 0.5, "machine": 0.5},
    "cores": 8,
}


def compose(tmp_path: Path, *overrides: str) -> DictConfig:
    return compose_stage("flow_test", ["hardware=cpu", f"paths.checkpoints={tmp_path}", *overrides])


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["--seconds", "30"], ["flow_test.seconds=30"]),
        (["--seconds=30", "mode=sync"], ["flow_test.seconds=30", "mode=sync"]),
        (["--provoke", "lost", "run.name=x"], ["flow_test.provoke=lost", "run.name=x"]),
        (["--workers", "--stage=challenger"], ["flow.workers=true", "flow_test.stage=challenger"]),
    ],
)
def test_options_and_overrides_can_be_mixed(arguments: list[str], overrides: list[str]) -> None:
    assert flow_test_overrides(arguments) == overrides


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(CheckError, match="--seconds needs a value"):
        flow_test_overrides(["mode=sync", "--seconds"])


def test_an_unknown_fault_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(OverrideError, match="stopped-producer"):
        compose(tmp_path, "flow_test.provoke=sabotage")


def speed(rate: float, **busy: float) -> dict[str, Any]:
    """A measurement of so many rows a second out, with these busy shares."""
    return {**SPEED, "out": rate, "busy": {**SPEED["busy"], **busy}}


def test_queues_twice_as_fast_as_the_run_needs_are_fast_enough() -> None:
    said = judge(speed(2 * MARGIN), NEED)
    assert {level for level, _ in said} == {"info"}
    assert "100 rows/s in, 4 out (alone 250 and 120)" in said[0][1]
    assert "2 rows/s: solver, 8 prompts × 5 rollouts in 20 s at least" in said[-1][1]


@pytest.mark.parametrize(
    ("busy", "named"),
    [
        (
            {"controller": BUSY},
            "Lock contention: every put and take waits for the one thread of TransferQueue",
        ),
        ({"storage": BUSY}, "num_data_storage_units"),
        ({"machine": 0.95}, "All 8 cores of this machine are busy"),
        ({"consumer": 0.9}, "reading is its limit"),
        ({"producer": 0.9}, "flow_test.workers"),
        ({}, "Nothing that takes part is busy"),
    ],
)
def test_below_twice_the_need_is_a_warning_that_names_what_keeps_the_rows_back(
    busy: dict[str, float], named: str
) -> None:
    level, text = judge(speed(3.0, **busy), NEED)[-1]
    assert level == "warning" and "only 1.5 times as fast" in text and named in text
    assert ("Lock contention" in text) == bool(busy.keys() & {"controller", "storage"})
    assert "the queues are slower" in judge(speed(1.0, **busy), NEED)[-1][1]


def test_a_need_that_is_unknown_is_said_and_not_guessed() -> None:
    level, text = judge(SPEED, replace(NEED, step_s=None))[-1]
    assert level == "warning" and "unknown" in text


def test_the_need_is_the_declared_runs_and_not_the_flow_tests(tmp_path: Path) -> None:
    overrides = ["hardware=cpu", f"paths.checkpoints={tmp_path}", "flow_test.seconds=3", "run.name=x"]
    need = needed("challenger", [*overrides, "data.train_batch_size=4"])
    assert (need.prompts, need.rollouts) == (4, 1) and need.source.startswith("assumed")
    assert need.step_s is not None and need.rows_per_s == 4 / need.step_s
    room = ["transfer_queue.backend.SimpleStorage.total_storage_size=40"]
    batch = full_speed(compose(tmp_path, *room), replace(NEED, prompts=256))
    assert batch is not None and batch["prompts"] == 2  # two batches at once in half of the room
    assert full_speed(compose(tmp_path, "flow_test.speed_s=0"), NEED) is None
    assert full_speed(compose(tmp_path, "flow_test.provoke=overflow"), NEED) is None


def test_a_row_at_full_speed_is_as_large_as_it_is_said_to_be() -> None:
    load = flow_speed.Load(1, 1, prompt_tokens=30, response_tokens=50)
    row = flow_speed.made_row(load)
    assert sum(column.values().nbytes for column in row.values()) == load.row_bytes


@pytest.mark.parametrize("fault", ["slow-consumer", "stale"])
def test_a_fault_that_a_synchronous_trainer_cannot_have_is_refused(tmp_path: Path, fault: str) -> None:
    with pytest.raises(CheckError, match="mode=colocate_async or separate_async"):
        run_flow_test(compose(tmp_path, "mode=sync", f"flow_test.provoke={fault}"), NEED)


def test_parent_and_child_agree_on_names() -> None:
    assert COUNTERS_FILE == flow_counters.COUNTERS_FILE
    assert SPEED_FILE == flow_speed.SPEED_FILE
    assert schema_of("flow_test")["flow_test.provoke"].limits.choices == flow_load.FAULTS


def test_every_flow_point_that_is_waited_on_is_counted() -> None:
    counted = {"prompts", "buffer", "environment", *CALLS}
    queues = {"retrieval queue", "solver queue"}
    assert {name for names in WAITS_ON.values() for name in names} <= counted | queues


@pytest.mark.parametrize("stage", ["challenger", "solver"])
def test_a_runs_monitor_writes_into_its_folder(tmp_path: Path, stage: str) -> None:
    config = resolve(compose_stage(stage, ["hardware=cpu", f"paths.checkpoints={tmp_path}"]))
    config.retrieval.port, config.solver.port = 8000, 8001
    monitor = flow_monitor(config)
    assert monitor._path == tmp_path / f"{stage}_iter1" / "flow.jsonl"
    # The solver stage has no solver's server next to its policy.
    assert len(monitor._sources) == (4 if stage == "challenger" else 3)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_an_asynchronous_run_can_replace_a_single_prompt(tmp_path: Path, mode: str) -> None:
    """veRL 0.9.1 asks for as many as were evicted and refuses all but whole fetches of the data loader."""
    assert compose_stage("solver", ["hardware=cpu", f"mode={mode}"]).data.gen_batch_size == 1
    assert compose_stage("solver", ["hardware=cpu"]).data.gen_batch_size is None


def test_separate_asynchronous_mode_gets_what_verl_asks_of_its_config(tmp_path: Path) -> None:
    config = resolve(compose(tmp_path, "mode=separate_async"))
    fit_to_mode(config)
    actor, step = config.actor_rollout_ref.actor, config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == step * actor.ppo_mini_batch_size
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive"


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "flow.jsonl").read_text().splitlines()]


@pytest.mark.slow("a start of the trainer; test_flow_counters.py counts on its real buffer")
def test_a_producer_that_stops_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """On the real trainer class, TransferQueue, Ray and replay buffer."""
    watch, out, err = Watch(), io.StringIO(), io.StringIO()
    arguments = [
        "hardware=cpu",
        f"paths.checkpoints={tmp_path}",
        "data.train_batch_size=4",
        "flow_test.workers=1",
    ]
    quick = [
        "flow_test.rollout_s=0.2",
        "flow_test.update_s=0.2",
        "watchdog.floor_s=4",
        "watchdog.cold_start_s=4",
    ]

    done = threading.Event()

    def watch_processes() -> None:
        while not done.wait(0.5):
            watch.poll(psutil.Process(os.getpid()))

    before = {process.pid for process in psutil.process_iter()}
    watching = threading.Thread(target=watch_processes)
    watching.start()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["flow-test", "--seconds", "20", "--provoke", "stopped-producer", *arguments, *quick])
    finally:
        done.set()
        watching.join()
    assert code == 1
    assert "rollout starvation, rollout workers" in err.getvalue()
    [event] = [
        e for e in read_json_lines(tmp_path / "flow_test" / "logs" / "events.jsonl") if e["kind"] == "stall"
    ]
    assert event["culprit" if "culprit" in event else "component"] == "rollout workers"
    death = examine(tmp_path / "flow_test")
    assert (death.state, death.culprit) == ("failed", "rollout workers")
    last = records(tmp_path / "flow_test")[-1]
    assert last["ended"]
    samples = last["samples"]
    assert samples["accepted"] > 0  # it flowed before
    assert samples["lost"] == 0
    assert samples["asked"] == samples["accepted"] + samples["in_flight"]
    assert last["about"]["staleness"]["limit"] == 7
    deadline = time.monotonic() + 30
    own = {key: command for key, command in watch.processes.items() if key[0] not in before}
    left = Watch(own)
    while left.alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left.alive() == []
    assert {address.removeprefix("::ffff:") for address, _ in watch.listeners} <= {"127.0.0.1", "::1"}


@pytest.mark.slow("a start of the trainer; the figures' verdicts are judged above, the counts on its buffer")
def test_a_test_that_finds_nothing_ends_well_with_its_rates_and_is_finished(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    arguments = ["hardware=cpu", "mode=sync", f"paths.checkpoints={tmp_path}", "flow_test.workers=1"]
    quick = ["data.train_batch_size=4", "flow_test.rollout_s=0.2", "flow_test.update_s=0.2"]
    # A loaded machine may take long between two steps.
    patient = ["watchdog.floor_s=60", "watchdog.cold_start_s=60"]
    with redirect_stdout(out), redirect_stderr(err):
        code = main(
            ["flow-test", "--seconds", "10", "--workers", "flow_test.speed_s=1", *arguments, *quick, *patient]
        )
    assert (code, err.getvalue()) == (0, "")
    printed = out.getvalue()
    for words in ("full speed, both at once", "the run needs", "warm-up is complete after", "put "):
        assert words in printed
    first = records(tmp_path / "flow_test")[0]["samples"]
    assert first is None or first["accepted"] == 0  # rows at full speed are none of the run's
    record = json.loads((tmp_path / "flow_test" / SPEED_FILE).read_text())
    assert record["in"] > 0 and record["out"] > 0 and {"controller", "storage"} <= record["busy"].keys()
    death = examine(tmp_path / "flow_test")
    assert death.state == "finished" and death.facts["warm-up"].startswith("complete after")
