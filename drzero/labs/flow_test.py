"""The flow-test: generated samples through veRL's own queues and replay buffer, watched like a run.

    drzero flow-test --seconds 30 hardware=cpu
    drzero flow-test --stage challenger --workers hardware=8xh100
    drzero flow-test --provoke stopped-producer mode=sync

First rows are written and taken at full speed, and compared with what the declared run needs
(`drzero.labs.flow_speed`): a warning below twice as much. Then samples flow as in a run. The trainer
class, TransferQueue, batch size and staleness limit are those of the config; there is no model, no data and
no service (`verl_ext.trainer.flow_load`). Flow monitor and watchdog are those of a run: on a healthy machine
they find nothing, and a provoked fault must be named, as a symptom or as a stall.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, open_dict

from drzero.labs.flow_speed import Need, full_speed, judge, needed
from drzero.ops.console import say, set_verbose
from drzero.ops.errors import RunFailed
from drzero.ops.flow.monitor import FLOW_FILE, FlowMonitor, line
from drzero.ops.process.child import ChildError, Command
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EVENTS_FILE, EventLog, read_json_lines
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import run_supervised
from drzero.recipe.compose import compose_stage, resolve, verl_env, write_resolved
from drzero.recipe.errors import CheckError
from drzero.stages.flow import COUNTERS_FILE, flow_monitor
from drzero.stages.watch import PROGRESS, watch_plan

_OPTIONS = {
    "--seconds": "flow_test.seconds",
    "--provoke": "flow_test.provoke",
    "--stage": "flow_test.stage",
}
_SWITCHES = {"--workers": "flow.workers=true"}
SPEED_FILE = "flow_speed.json"
"""As in `verl_ext.trainer.flow_speed`, which imports veRL."""


class FlowFailed(RunFailed):
    """Samples do not flow as they should; the message has the symptoms and the stall, if any."""


def flow_test_overrides(arguments: Sequence[str]) -> list[str]:
    """Overrides in Hydra's grammar, from arguments that may also be `--seconds 30` or `--seconds=30`."""
    overrides, waiting = [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, _, value = argument.partition("=")
        if argument in _SWITCHES:
            overrides.append(_SWITCHES[argument])
            continue
        if option not in _OPTIONS:
            overrides.append(argument)
            continue
        if not value and not waiting:
            raise CheckError(f"{option} needs a value after it")
        overrides.append(f"{_OPTIONS[option]}={value or waiting.pop(0)}")
    return overrides


def flow_test(arguments: Sequence[str]) -> None:
    """Compose the test and the run that it is for, and run it; raises what `run_flow_test` raises."""
    overrides = flow_test_overrides(arguments)
    config = compose_stage("flow_test", overrides)
    set_verbose(config.verbose)
    run_flow_test(config, needed(config.flow_test.stage, overrides))


def run_flow_test(config: DictConfig, need: Need) -> None:
    """Push samples through for `flow_test.seconds`, print what is found, and leave nothing running.

    Raises CheckError for a fault that the mode cannot have, ChildFailed when the load itself fails, and
    FlowFailed when there was a symptom or a stall, those of a provoked fault included.
    """
    # Queues are tested on this machine alone, whatever cluster the run is for.
    config.machine.nodes, config.machine.ray_address = 1, None
    config = resolve(config)
    fit_to_mode(config)
    with open_dict(config):
        config.full_speed = full_speed(config, need)
    folder = Path(config.run.dir)
    events = folder / "logs" / EVENTS_FILE
    with HeldLock(folder / "lock"):
        ours = (events, *(folder / name for name in (COUNTERS_FILE, SPEED_FILE, FLOW_FILE)))
        for old in (*ours, *(folder / PROGRESS).glob("*.json")):
            old.unlink(missing_ok=True)
        resolved = write_resolved(config)
        monitor = flow_monitor(config, services=False, log=say)
        plan = watch_plan(config, monitor)
        # A stall is reported and never ends the test, however the config's runs end.
        plan = replace(plan, landmarks=replace(plan.landmarks, driver="load"), stall_action="report")
        try:
            with ServiceGroup((), events=EventLog(events)) as nothing, monitor:
                run_supervised(_load(config, folder, resolved), nothing, plan=plan)
        except ChildError as error:
            if found := _found(monitor, events):
                # veRL ends a run on some faults: what was found before explains more than the exit.
                raise FlowFailed(f"{found}\nThen {error}") from error
            raise
        _report_speed(folder / SPEED_FILE, need)
        try:
            _report(monitor, _found(monitor, events))
        except FlowFailed as failed:
            # The load itself ended well: for `drzero diagnose` this is how the test ended.
            EventLog(events).add("exit", "flow", str(failed), code=1, culprit=_culprit(monitor, events))
            raise


def fit_to_mode(config: DictConfig) -> None:
    """Adjust the config to mode and fault; raises CheckError for a fault that the mode cannot have."""
    mode = str(config.trainer.v1.trainer_mode).removeprefix(f"drzero_{config.method}_")
    provoke = config.flow_test.provoke
    if mode == "sync" and provoke in ("slow-consumer", "stale"):
        raise CheckError(
            f"flow_test.provoke={provoke} needs mode=colocate_async or separate_async: a synchronous trainer "
            "asks for no sample ahead, so that none can pile up or grow old"
        )
    rollout, batch = config.actor_rollout_ref.rollout, config.data.train_batch_size
    with open_dict(config):
        if mode == "separate_async":
            # veRL requires nodes for the rollout and a weight transfer engine; neither is used here.
            config.actor_rollout_ref.actor.ppo_mini_batch_size = (
                batch // config.trainer.v1.separate_async.parameter_sync_step
            )
            rollout.nnodes, rollout.n_gpus_per_node = 1, 1
            rollout.checkpoint_engine.backend = "nccl"
        if provoke == "stale":
            # What is requested ahead is one step old when it is sampled.
            config.trainer.v1.sampler.max_off_policy_threshold = 1
        if provoke == "overflow":
            # Room for half of what is requested at once.
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
            # Neither a model nor a GPU is used, on any machine.
            "VERL_PLATFORM": "cpu",
            "DRZERO_PROGRESS_DIR": str(folder / PROGRESS),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TQ_LOGGING_LEVEL": "ERROR",
            # Nothing here leaves the machine, whatever the profile is for.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        },
    )


def _report_speed(path: Path, need: Need) -> None:
    if path.is_file():
        for level, text in judge(json.loads(path.read_text(encoding="utf-8")), need):
            say("flow", text, level)


def _culprit(monitor: FlowMonitor, events: Path) -> str:
    """Who is at fault: by the stall, else where the first symptom showed."""
    stalls = [event for event in read_json_lines(events) if event["kind"] == "stall"]
    return (
        str(stalls[0]["component"]) if stalls else monitor.symptoms[0].point if monitor.symptoms else "load"
    )


def _report(monitor: FlowMonitor, found: str) -> None:
    if monitor.last is None or monitor.last.samples is None:
        raise FlowFailed("nothing was seen: the load ended before its first count; see its log")
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


def _found(monitor: FlowMonitor, events: Path) -> str:
    """The symptoms and stalls, each kind once and as first seen; empty if there were none."""
    first = {(symptom.check, symptom.point): str(symptom) for symptom in reversed(monitor.symptoms)}
    lines = [*reversed(first.values())]
    stalls = [event for event in read_json_lines(events) if event["kind"] == "stall"]
    lines += [f"{event['pattern']}, {event['component']}: {event['text']}" for event in stalls[:1]]
    return "\n".join(["samples do not flow:", *(f"  {one}" for one in lines)]) if lines else ""
