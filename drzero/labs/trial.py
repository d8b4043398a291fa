"""Try a stage's trainer in a separate folder, without an update or a save. All else is as in a run.

    config = prepared(compose_stage("solver", ["run.name=check_trainer", …]), "solver")
    run_trial(config, stage_services(config, "solver"), change)     # `change` edits the config

Worth: the base of check-services and agent-bench. Tests `drzero/stages`. Goes with the last of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE, FLOW_FILE
from drzero.ops.services.services import AnySpec, ServiceGroup, ServiceSpec
from drzero.ops.supervisor import run_supervised
from drzero.recipe.environment import load_taskset
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.flight_recorder import flight_recorder
from drzero.stages.flow import COUNTERS_FILE, flow_monitor
from drzero.stages.services import search_spec, solver_spec
from drzero.stages.train import prepare_environment
from drzero.stages.training import prepare, trainer_command, write_for_trainer
from drzero.stages.watch import PROGRESS, watch_plan
from verl_ext.checkpoints import saved_step

HEARTBEATS, DUMPS, VALIDATED = "heartbeats.jsonl", "dumps", "check"
"""In the folder: phases as they begin, a step's rows, and veRL's dumps of a validation."""
_CHECK_EVERY_S = 0.5
_BLAME_S = 1.5  # a dead service may take a moment to be seen as dead


@dataclass(frozen=True)
class Step:
    """One tried step, such as a search or a reward."""

    name: str
    component: str  # who answers it
    seconds: float  # the mean of several calls
    outcome: str
    ok: bool = True


def print_steps(steps: Sequence[Step], kind: str, title: str) -> None:
    """Print steps as a table, failed ones in red."""
    table = new_table(title, kind, "component", ">seconds", "outcome")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for step in steps:
        style = None if step.ok else "bold red"
        table.add_row(step.name, step.component, f"{step.seconds:.2f}", step.outcome, style=style)
    console().print(table)


async def watched(work: Awaitable[None], services: ServiceGroup) -> None:
    """Run `work`. Raises ServiceDied as soon as a service ends."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_CHECK_EVERY_S)
            services.check()
        if task.exception() is not None:
            await asyncio.sleep(_BLAME_S)
            services.check()
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def prepared(config: DictConfig, stage: str) -> DictConfig:
    """Preflight, ports and rows of the stage. Returns the resolved config. Raises PreflightFailed."""
    return prepare_environment(config, load_taskset(config)) if stage == "train" else prepare(config, stage)


def stage_services(config: DictConfig, stage: str) -> list[AnySpec]:
    """The services of the stage's run. They are not restarted: a trial is to find a service that dies."""
    wanted: list[AnySpec] = []
    if stage != "train" or load_taskset(config).needs_retrieval:
        wanted.append(search_spec(config))
    # In the other stages the trainer's own engine generates every turn.
    if stage == "challenger":
        wanted.append(solver_spec(config))
    return [replace(spec, restarts=0) if isinstance(spec, ServiceSpec) else spec for spec in wanted]


def run_trial(config: DictConfig, specs: Sequence[AnySpec], change: Callable[[DictConfig], None]) -> None:
    """Raises CheckError for a run's folder, AlreadyRunning, and as `run_supervised`, for stalls too."""
    folder = Path(config.run.dir)
    if saved_step(folder):
        raise CheckError(f"run.name={config.run.name}: {folder} holds a run, which a trial would disturb")
    with HeldLock(folder / "lock"):
        # Nothing of an earlier trial may be read as this one's.
        names = (HEARTBEATS, COUNTERS_FILE, FLOW_FILE, f"logs/{EVENTS_FILE}")
        for pattern in (*names, f"{PROGRESS}/*.json", f"{DUMPS}/*.jsonl", f"{VALIDATED}/*.jsonl"):
            for old in folder.glob(pattern):
                old.unlink()
        change(config)
        write_for_trainer(config, folder)
        events = EventLog(folder / "logs" / EVENTS_FILE)
        with (
            ServiceGroup(specs, events=events) as services,
            flow_monitor(config) as flow,
            flight_recorder(folder) as recorder,
        ):
            # A hang ends the trial, and its diagnosis names the component.
            plan = replace(watch_plan(config, flow), stall_action="stop")
            run_supervised(trainer_command(config, folder, recorder), services, plan=plan)
