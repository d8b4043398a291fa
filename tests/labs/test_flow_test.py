"""The flow-test: options, faults, what it needs, and two real runs of it."""

import io
import json
import os
import threading
import time
from contextlib import redirect_stderr, redirect_stdout

import psutil
import pytest
from watch import Watch

from drzero.cli import main
from drzero.labs.flow_test import fit_to_mode, flow_test_overrides, rows_per_s, run_flow_test
from drzero.ops.records import read_json_lines
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import OverrideError
from drzero.recipe.settings.schema import schema_of
from drzero.stages.flow import CALLS, COUNTERS_FILE, flow_monitor
from drzero.stages.watch import WAITS_ON
from verl_ext.trainer import flow_counters, flow_load


def compose(tmp_path, *overrides):
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
def test_options_and_overrides_can_be_mixed(arguments, overrides):
    assert flow_test_overrides(arguments) == overrides


def test_an_option_without_a_value_an_unknown_fault_and_one_that_the_trainer_cannot_have_are_refused(
    tmp_path,
):
    with pytest.raises(CheckError, match="--seconds needs a value"):
        flow_test_overrides(["mode=sync", "--seconds"])
    with pytest.raises(OverrideError, match="stopped-producer"):
        compose(tmp_path, "flow_test.provoke=sabotage")
    for fault in ("slow-consumer", "stale"):
        with pytest.raises(CheckError, match="mode=colocate_async or separate_async"):
            run_flow_test(compose(tmp_path, "mode=sync", f"flow_test.provoke={fault}"))


def test_the_needed_rate_comes_from_the_declared_run(tmp_path):
    shared = ["hardware=cpu", f"paths.checkpoints={tmp_path}", "flow_test.seconds=3", "run.name=x"]
    four, eight = (
        rows_per_s("challenger", [*shared, f"data.train_batch_size={size}", "model=smollm2-135m"])
        for size in (4, 8)
    )
    assert four and eight
    assert rows_per_s("challenger", [*shared, "model=/no/such/model"]) is None


def test_parent_and_child_agree_on_names_and_every_flow_point_that_is_waited_on_is_counted():
    assert COUNTERS_FILE == flow_counters.COUNTERS_FILE
    assert schema_of("flow_test")["flow_test.provoke"].limits.choices == flow_load.FAULTS
    counted = {"prompts", "buffer", "environment", *CALLS}
    queues = {"retrieval queue", "solver queue"}
    assert {name for names in WAITS_ON.values() for name in names} <= counted | queues


@pytest.mark.parametrize("stage", ["challenger", "solver"])
def test_a_runs_monitor_writes_into_its_folder(tmp_path, stage):
    config = resolve(compose_stage(stage, ["hardware=cpu", f"paths.checkpoints={tmp_path}"]))
    config.retrieval.port, config.solver.port = 8000, 8001
    monitor = flow_monitor(config)
    assert monitor._path == tmp_path / f"{stage}_iter1" / "flow.jsonl"
    # The solver stage has no solver's server next to its policy.
    assert len(monitor._sources) == (4 if stage == "challenger" else 3)


@pytest.mark.parametrize(("mode", "size"), [("colocate_async", 1), ("separate_async", 1), ("sync", None)])
def test_an_asynchronous_run_can_replace_a_single_prompt(mode, size):
    """veRL 0.9.1 asks for as many as were evicted and refuses all but whole fetches of the data loader."""
    assert compose_stage("solver", ["hardware=cpu", f"mode={mode}"]).data.gen_batch_size == size


def test_separate_asynchronous_mode_gets_what_verl_asks_of_its_config(tmp_path):
    config = resolve(compose(tmp_path, "mode=separate_async"))
    fit_to_mode(config)
    actor, step = config.actor_rollout_ref.actor, config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == step * actor.ppo_mini_batch_size
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive"


def records(folder):
    return [json.loads(text) for text in (folder / "flow.jsonl").read_text().splitlines()]


@pytest.mark.slow("a start of the trainer; test_flow_counters.py counts on its real buffer")
def test_a_producer_that_stops_is_named_and_nothing_is_left(tmp_path):
    """On the real trainer class, TransferQueue, Ray and replay buffer."""
    watch, out, err = Watch(), io.StringIO(), io.StringIO()
    arguments = ["hardware=cpu", f"paths.checkpoints={tmp_path}", "data.train_batch_size=4"]
    quick = [f"flow_test.{key}" for key in ("workers=1", "rollout_s=0.2", "update_s=0.2")]
    quick += ["watchdog.floor_s=4", "watchdog.cold_start_s=4"]

    done = threading.Event()

    def watch_processes():
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
    events = read_json_lines(tmp_path / "flow_test" / "logs" / "events.jsonl")
    (event,) = [one for one in events if one["kind"] == "stall"]
    assert event.get("culprit", event["component"]) == "rollout workers"
    death = examine(tmp_path / "flow_test")
    assert (death.state, death.culprit) == ("failed", "rollout workers")
    last = records(tmp_path / "flow_test")[-1]
    assert last["ended"]
    samples = last["samples"]
    assert samples["accepted"] > 0 and samples["lost"] == 0  # it flowed before
    assert samples["asked"] == samples["accepted"] + samples["in_flight"]
    assert last["about"]["staleness"]["limit"] == 7
    deadline = time.monotonic() + 30
    own = {key: command for key, command in watch.processes.items() if key[0] not in before}
    left = Watch(own)
    while left.alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left.alive() == []
    assert {address.removeprefix("::ffff:") for address, _ in watch.listeners} <= {"127.0.0.1", "::1"}
