"""Push generated samples through veRL's own queues and replay buffer, and watch them like a run.

    drzero flow-test --seconds 30 hardware=cpu
    drzero flow-test --stage challenger --workers hardware=8xh100
    drzero flow-test --provoke stopped-producer mode=sync

The trainer class, TransferQueue, batch size and staleness limit come from the config. There is no model, no
data and no service (`verl_ext.trainer.flow_load`). Flow monitor and watchdog find nothing on a healthy
machine, and name a provoked fault.

Worth: shows in 30 seconds whether a new mode, batch size or veRL version moves samples at all. Tests
`verl_ext/trainer`. Can go when veRL tests its trainer modes with our buffer limits.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, open_dict

from drzero.ops.console import say, set_verbose
from drzero.ops.errors import RunFailed
from drzero.ops.flow.monitor import FlowMonitor, line
from drzero.ops.notices import Level
from drzero.ops.process.child import ChildError, Command
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE, FLOW_FILE, read_json_lines
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import run_supervised
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import pace_of
from drzero.preflight.machine import declared_machine
from drzero.recipe.compose import compose_stage, resolve, verl_env, write_resolved
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import key_of
from drzero.stages.flow import COUNTERS_FILE, flow_monitor
from drzero.stages.watch import PROGRESS, watch_plan

_OPTIONS = {"--seconds": "flow_test.seconds", "--provoke": "flow_test.provoke", "--stage": "flow_test.stage"}
_TEST_KEYS = ("flow_test", "flow", "run", "watchdog")  # of the test, not of the run it is for


class FlowFailed(RunFailed):
    """Samples do not flow as they should. The message lists the symptoms and the stall."""


def flow_test_overrides(arguments: Sequence[str]) -> list[str]:
    """Turn `--seconds 30`, `--seconds=30` and `--workers` into overrides; others stay."""
    overrides, waiting = [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, _, value = argument.partition("=")
        if argument == "--workers":
            overrides.append("flow.workers=true")
        elif option not in _OPTIONS:
            overrides.append(argument)
        elif value or waiting:
            overrides.append(f"{_OPTIONS[option]}={value or waiting.pop(0)}")
        else:
            raise CheckError(f"{option} needs a value after it")
    return overrides


def flow_test(arguments: Sequence[str]) -> None:
    """Run the test, then compare its rate with the declared run's need."""
    overrides = flow_test_overrides(arguments)
    config = compose_stage("flow_test", overrides)
    set_verbose(config.verbose)
    stage = config.flow_test.stage
    needed = rows_per_s(stage, overrides)
    accepted = run_flow_test(config)
    if needed is None:
        say("flow", f"no step time is known for the {stage} run, so its need cannot be estimated")
        return
    level: Level = "info" if accepted >= needed else "warning"
    say("flow", f"{accepted:.3g} samples/s were trained on; the {stage} run needs {needed:.3g}", level)


def rows_per_s(stage: str, overrides: Sequence[str]) -> float | None:
    """The rows a second a stage needs at its shortest estimated step. None for a model of unknown size."""
    config = resolve(
        compose_stage(stage, [word for word in overrides if key_of(word).partition(".")[0] not in _TEST_KEYS])
    )
    machine = declared_machine(config, starting=False)
    pace = pace_of(CheckContext(config, stage, machine, starting=False, ahead=True, readings=Readings()))
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return None if pace is None else float(rows / pace.step[0])


def run_flow_test(config: DictConfig) -> float:
    """Returns samples trained on per second. Raises CheckError, ChildFailed or FlowFailed."""
    # Queues are tested on this machine alone, even if the run is for a cluster.
    config.machine.nodes, config.machine.ray_address = 1, None
    config = resolve(config)
    fit_to_mode(config)
    folder = Path(config.run.dir)
    events = folder / "logs" / EVENTS_FILE
    with HeldLock(folder / "lock"):
        for old in [events, folder / COUNTERS_FILE, folder / FLOW_FILE, *(folder / PROGRESS).glob("*.json")]:
            old.unlink(missing_ok=True)
        resolved = write_resolved(config)
        monitor = flow_monitor(config, services=False, log=say)
        plan = watch_plan(config, monitor)
        # Report a stall without ending the test.
        plan = replace(plan, landmarks=replace(plan.landmarks, driver="load"), stall_action="report")
        try:
            with ServiceGroup((), events=EventLog(events)) as nothing, monitor:
                run_supervised(_load(config, folder, resolved), nothing, plan=plan)
        except ChildError as error:
            if found := _found(monitor, events):
                # veRL ends a run on some faults. The symptoms explain more than the exit.
                raise FlowFailed(f"{found}\nThen {error}") from error
            raise
        try:
            return _report(monitor, _found(monitor, events)) / config.flow_test.seconds
        except FlowFailed as failed:
            # The load itself ended well, so `drzero diagnose` needs this event.
            stalled = [
                str(event["component"]) for event in read_json_lines(events) if event["kind"] == "stall"
            ]
            culprits = [*stalled, *(symptom.point for symptom in monitor.symptoms), "load"]
            EventLog(events).add("exit", "flow", str(failed), code=1, culprit=culprits[0])
            raise


def fit_to_mode(config: DictConfig) -> None:
    """Adjust the config to mode and fault. Raises CheckError for a fault that the mode cannot have."""
    mode = str(config.trainer.v1.trainer_mode).removeprefix(f"drzero_{config.method}_")
    provoke = config.flow_test.provoke
    if mode == "sync" and provoke in ("slow-consumer", "stale"):
        raise CheckError(
            f"flow_test.provoke={provoke} needs mode=colocate_async or separate_async: a synchronous trainer "
            "requests no samples ahead, so none can pile up or grow old"
        )
    rollout, batch = config.actor_rollout_ref.rollout, config.data.train_batch_size
    with open_dict(config):
        if mode == "separate_async":
            # veRL requires nodes for the rollout and a weight transfer engine. The test uses neither.
            steps = config.trainer.v1.separate_async.parameter_sync_step
            config.actor_rollout_ref.actor.ppo_mini_batch_size = batch // steps
            rollout.nnodes, rollout.n_gpus_per_node = 1, 1
            rollout.checkpoint_engine.backend = "nccl"
        if provoke == "stale":
            # A sample requested ahead is one step old when it is taken.
            config.trainer.v1.sampler.max_off_policy_threshold = 1
        if provoke == "overflow":
            # Room for half of one request.
            config.transfer_queue.backend.SimpleStorage.total_storage_size = batch * rollout.n // 2


def _load(config: DictConfig, folder: Path, resolved: Path) -> Command:
    root = str(Path(__file__).resolve().parents[2])
    return Command(
        name="load",
        command=(sys.executable, "-m", "verl_ext.trainer.flow_load", str(resolved)),
        log_path=folder / "logs" / "load.log",
        env={
            **verl_env(config),
            "PYTHONPATH": root,
            # The test needs no GPU on any machine.
            "VERL_PLATFORM": "cpu",
            "DRZERO_PROGRESS_DIR": str(folder / PROGRESS),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TQ_LOGGING_LEVEL": "ERROR",
            # Nothing leaves this machine, whatever the profile is for.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        },
    )


def _report(monitor: FlowMonitor, found: str) -> float:
    if monitor.last is None or monitor.last.samples is None:
        raise FlowFailed("nothing was seen: the load ended before its first count. See logs/load.log")
    say("flow", line(None, monitor.last))
    samples = monitor.last.samples
    say(
        "flow",
        f"asked {samples.asked:g} = accepted {samples.accepted:g} + invalid {samples.invalid:g} + failed "
        f"{samples.failed:g} + stale {samples.stale:g} + filtered {samples.filtered:g} + in flight "
        f"{samples.in_flight:g} + lost {max(samples.lost, 0):g}",
    )
    if found:
        raise FlowFailed(found)
    say("flow", "no fault was seen")
    return samples.accepted


def _found(monitor: FlowMonitor, events: Path) -> str:
    """Each kind of symptom as first seen, then the first stall."""
    first = {(symptom.check, symptom.point): str(symptom) for symptom in reversed(monitor.symptoms)}
    lines = [*reversed(first.values())]
    stalls = [event for event in read_json_lines(events) if event["kind"] == "stall"]
    lines += [f"{event['pattern']}, {event['component']}: {event['text']}" for event in stalls[:1]]
    return "\n".join(["samples do not flow:", *(f"  {one}" for one in lines)]) if lines else ""
