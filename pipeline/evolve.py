"""The self-evolution loop: one command, resumable at any point.

    drzero evolve loop=demo                          # two small iterations on the demo world, on a CPU
    drzero evolve hardware=8xh100 model=qwen2.5-3b   # three iterations as published
    drzero evolve --from solver_iter2 …              # do a stage and all that follows from it again
    drzero status                                    # the loop as a table

Every stage is a child process (`drzero STAGE …`) with its own composed config. All configs are composed and
checked, as far as they can be, before the first stage starts, so that a mistake in the last one costs
nothing. The manifest records what is complete; a rerun goes on at the first stage that is not. A finished
stage whose settings, inputs or outputs have changed since is an error that says what changed: results built
on it would be wrong. A stage that ends for lack of time (docs/stopping.md) ends the loop in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from ops.leftovers import end_leftovers, remove_temporaries
from ops.lock import HeldLock
from ops.logs import say
from ops.process import ChildError, Command
from ops.services import ServiceGroup
from ops.supervisor import Unfinished, run_supervised
from pipeline.compose import compose_stage
from pipeline.loop import StageRun, compose_loop, plan_loop
from pipeline.loop_checks import check_ahead
from pipeline.loop_report import print_loop, print_scores
from pipeline.loop_state import check_finished, forget, log_path, prune, split_from, stages_from, take_up
from pipeline.manifest import Manifest
from pipeline.out_of_time import OutOfTime, require_time
from pipeline.stage_identity import identity, input_identities, significant_config
from pipeline.stage_result import RESULT, read_result

LOOP_VARIABLE = "DRZERO_LOOP"
"""Marks the loop's processes, so that a rerun knows what a killed run may have left."""
_STAGE_GRACE_S = 30.0
"""A stage stops its trainer and its services in order, each with a grace of its own."""


def run_evolve(arguments: Sequence[str]) -> None:
    """Run or continue the loop; `--from STAGE_iterN` does that stage again and all that follows from it.

    Raises OverrideError, CheckError or DataError before anything starts, AlreadyRunning while another loop
    runs in the same place, LoopChanged when finished stages no longer fit, ChildError when a stage fails,
    OutOfTime when the stop time comes first.
    """
    redo_from, overrides = split_from(arguments)
    loop = compose_loop(overrides)
    plan = plan_loop(loop)
    configs = {run.name: compose_stage(run.stage, run.overrides) for run in plan}
    folder = Path(configs[plan[0].name].paths.checkpoints) / "evolve"
    with HeldLock(folder / "lock"):
        end_leftovers("evolve", LOOP_VARIABLE, str(folder))
        for place in (folder, *(Path(config.run.dir) for config in configs.values())):
            remove_temporaries(place)
        if loop.prepare_demo:
            _prepare_demo(plan[0], folder)
        manifest = Manifest(folder / "manifest.json")
        take_up(manifest, configs, folder)
        again = stages_from(redo_from, plan, manifest) if redo_from else []
        check_finished([run for run in plan if run not in again], configs, manifest)
        check_ahead([r for r in plan if r in again or not manifest.is_complete(r.name)], configs)
        forget(again, configs, manifest)
        for run in plan:
            if not manifest.is_complete(run.name):
                require_time(run.name)
                _run_stage(run, configs[run.name], manifest, folder)
            if not loop.keep_checkpoints:
                prune(run, configs, manifest)
        print_loop(manifest, [run.name for run in plan], running=False)
        print_scores(
            {run.iteration: Path(configs[run.name].run.dir) for run in plan if run.stage == "evaluate"}
        )


def _prepare_demo(first: StageRun, folder: Path) -> None:
    roots = [override for override in first.overrides if override.startswith("paths.")]
    _run_child("demo-data", ("demo-data", *roots), folder)


def _run_stage(run: StageRun, config: DictConfig, manifest: Manifest, folder: Path) -> None:
    say("evolve", f"{run.name} {'starts' if not manifest.entry(run.name).starts else 'goes on'}")
    # A result is written last; an old one must not vouch for a start that is yet to finish.
    (Path(config.run.dir) / RESULT).unlink(missing_ok=True)
    settings = significant_config(run.stage, config, run.overrides)
    manifest.begin(run.name, settings, input_identities(run.stage, config))
    try:
        _run_child(run.name, (run.stage, *run.overrides), folder)
    except (ChildError, OutOfTime, KeyboardInterrupt, SystemExit) as error:
        manifest.end(run.name, "failed", _reason(error))
        raise
    _record(run, config, manifest)


def _reason(error: BaseException) -> str:
    """What ended a stage, in a line: its own words where it has left any."""
    if isinstance(error, OutOfTime):
        return str(error)
    if not isinstance(error, ChildError):
        return type(error).__name__
    own = [line for line in error.tail if line.startswith("drzero ")]
    return own[0] if own else str(error).splitlines()[0]


def _run_child(name: str, arguments: Sequence[str], folder: Path) -> None:
    command = Command(
        name=name,
        command=(sys.executable, "-m", "pipeline.cli", *arguments),
        log_path=log_path(folder, name),
        env={LOOP_VARIABLE: str(folder)},
    )
    # No services (a stage starts its own), but the group's handling of SIGTERM.
    with ServiceGroup([]) as services:
        try:
            run_supervised(command, services, _STAGE_GRACE_S)
        except Unfinished as stopped:
            told = _reason(stopped).removeprefix(f"drzero {arguments[0]}: ")
            raise OutOfTime(told if told.startswith(name) else f"{name}: {told}") from stopped


def _record(run: StageRun, config: DictConfig, manifest: Manifest) -> None:
    """Take a finished stage's result into the manifest."""
    result = read_result(Path(config.run.dir))
    if result is None:
        raise FileNotFoundError(f"{run.name} ended well but left no {RESULT} in {config.run.dir}")
    entry = manifest.entry(run.name)
    entry.outputs = {
        name: {"path": str(path), "identity": identity(path), "pruned": False}
        for name, path in result.outputs.items()
    }
    # Once more: what the stage has downloaded or merged for itself is known by content only now.
    entry.inputs = input_identities(run.stage, config)
    entry.tokens, entry.figures = result.tokens, result.figures
    manifest.end(run.name, "complete")
