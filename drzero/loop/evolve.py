"""The self-evolution loop: one command, resumable at any point.

    drzero evolve loop=demo                          # two small iterations on the demo world, on a CPU
    drzero evolve hardware=8xh100 model=qwen2.5-3b   # three iterations as published
    drzero evolve --from solver_iter2 …              # redo a stage and all that depend on it
    drzero evolve loop=demo --seeds 3                # loops of three training seeds, one after another
    drzero status                                    # the loop as a table

Every stage is a child process (`drzero STAGE …`). As far as possible, all configs are composed and checked
before the first stage starts. The manifest records finished stages, and a rerun resumes at the first other
one. If settings, inputs or outputs of a finished stage have changed since, the loop stops and lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from drzero.loop.identity import identity, input_identities, significant_config
from drzero.loop.manifest import Manifest
from drzero.loop.plan import StageRun, compose_loop, plan_loop
from drzero.loop.report import print_loop
from drzero.loop.seeds import run_seeds, split_seeds
from drzero.loop.state import check_finished, forget, log_path, prune, recover, split_from, stages_from
from drzero.ops.console import say, set_verbose
from drzero.ops.errors import OutOfTime
from drzero.ops.files import remove_temporaries
from drzero.ops.process.child import ChildError, Command, end_leftovers
from drzero.ops.process.isolated import in_child
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.ops.stop_time import require_time
from drzero.ops.supervisor import Unfinished, run_supervised
from drzero.recipe.compose import compose_stage, write_as_run
from drzero.runs.report.write import refresh_report, reported
from drzero.runs.view.follow import following
from drzero.stages.result import RESULT, read_result

LOOP_VARIABLE = "DRZERO_LOOP"
"""Environment variable of the loop's processes, by which a rerun finds a killed run's leftovers."""
_STAGE_GRACE_S = 30.0  # Seconds. A stage stops its trainer and its services one after another.


def run_evolve(arguments: Sequence[str]) -> None:
    """Run or resume the loop, or with `--seeds N` the loops of N training seeds."""
    seeds, rest = split_seeds(arguments)
    if seeds is None:
        run_loop(rest)
    else:
        run_seeds(seeds, rest, run_loop)


def run_loop(arguments: Sequence[str]) -> None:
    """Run or resume one loop. `--from STAGE_iterN` redoes that stage and all that depend on it.

    Raises before anything starts: OverrideError, CheckError, DataError, AlreadyRunning, or LoopChanged. Later
    it raises ChildError if a stage fails, and OutOfTime at the stop time.
    """
    redo_from, overrides = split_from(arguments)
    loop = compose_loop(overrides)
    plan = plan_loop(loop)
    # The first stage's config has the loop's folder, so a wrong `--from` is refused before anything is made.
    first = compose_stage(plan[0].stage, plan[0].overrides)
    set_verbose(first.verbose)
    folder = Path(first.paths.checkpoints) / "evolve"
    if redo_from:
        stages_from(redo_from, plan, Manifest(folder / "manifest.json"))
    configs = {plan[0].name: first}
    configs |= {run.name: compose_stage(run.stage, run.overrides) for run in plan[1:]}
    # The report comes after the lock: with the lock held, it would say that the loop still runs.
    with reported(folder), HeldLock(folder / "lock"):
        end_leftovers("evolve", LOOP_VARIABLE, str(folder))
        for place in (folder, *(Path(config.run.dir) for config in configs.values())):
            remove_temporaries(place)
        if loop.prepare_demo:
            roots = [override for override in plan[0].overrides if override.startswith("paths.")]
            _run_child("demo-data", ("demo-data", *roots), folder)
        manifest = Manifest(folder / "manifest.json")
        recover(manifest, configs, folder)
        again = stages_from(redo_from, plan, manifest) if redo_from else []
        check_finished([run for run in plan if run not in again], configs, manifest)
        in_child(_check_ahead, [r for r in plan if r in again or not manifest.is_complete(r.name)], configs)
        forget(again, configs, manifest)
        write_as_run(loop, folder)
        for number, run in enumerate(plan, 1):
            if not manifest.is_complete(run.name):
                require_time(run.name)
                begins = "resumes" if manifest.entry(run.name).starts else "starts"
                say("evolve", f"{run.name} {begins}, stage {number} of {len(plan)}")
                _run_stage(run, configs[run.name], manifest, folder)
            if not loop.keep_checkpoints:
                prune(run, configs, manifest)
        print_loop(manifest, [run.name for run in plan], running=False)
        from drzero.loop.report import report_scores
        from drzero.stages.examples import print_examples, read_examples

        evaluated = {
            run.iteration: Path(configs[run.name].run.dir) for run in plan if run.stage == "evaluate"
        }
        report_scores(evaluated, folder)
        for run in plan:
            if run.stage in ("challenger", "solver"):  # whose pages did not know the evaluations yet
                refresh_report(Path(configs[run.name].run.dir))
        last = {run.stage: run for run in plan if run.stage in ("challenger", "synthesize")}
        for run in last.values():
            if examples := read_examples(Path(configs[run.name].run.dir)):
                print_examples(examples, run.name)


def _check_ahead(runs: Sequence[StageRun], configs: dict[str, DictConfig]) -> None:
    from drzero.loop.preflight import check_ahead

    check_ahead(runs, configs)


def _run_stage(run: StageRun, config: DictConfig, manifest: Manifest, folder: Path) -> None:
    # A result marks a finished stage, so an old one must go before the stage runs.
    (Path(config.run.dir) / RESULT).unlink(missing_ok=True)
    settings = significant_config(run.stage, config, run.overrides)
    manifest.begin(run.name, settings, input_identities(run.stage, config))
    try:
        with following(config, relayed=True):
            _run_child(run.name, (run.stage, *run.overrides), folder)
    except (ChildError, OutOfTime, KeyboardInterrupt, SystemExit) as error:
        manifest.end(run.name, "failed", _reason(error))
        raise
    result = read_result(Path(config.run.dir))
    if result is None:
        raise FileNotFoundError(f"{run.name} exited with 0 but left no {RESULT} in {config.run.dir}")
    entry = manifest.entry(run.name)
    entry.outputs = {
        name: {"path": str(path), "identity": identity(path), "pruned": False}
        for name, path in result.outputs.items()
    }
    # Computed again: downloaded and merged models have a content identity only now.
    entry.inputs = input_identities(run.stage, config)
    entry.tokens, entry.figures = result.tokens, result.figures
    manifest.end(run.name, "complete")


def _reason(error: BaseException) -> str:
    if isinstance(error, OutOfTime):
        return str(error)
    if not isinstance(error, ChildError):
        return type(error).__name__
    printed = [line for line in error.tail if line.startswith("drzero ")]
    return printed[0] if printed else str(error).splitlines()[0]


def _run_child(name: str, arguments: Sequence[str], folder: Path) -> None:
    command = Command(
        name=name,
        command=(sys.executable, "-m", "drzero.cli", *arguments),
        log_path=log_path(folder, name),
        env={LOOP_VARIABLE: str(folder)},
        relays=True,
    )
    # A stage starts its own services. The group is here for its handling of SIGTERM.
    with ServiceGroup([]) as services:
        try:
            run_supervised(command, services, _STAGE_GRACE_S)
        except Unfinished as stopped:
            reason = _reason(stopped).removeprefix(f"drzero {arguments[0]}: ")
            raise OutOfTime(reason if reason.startswith(name) else f"{name}: {reason}") from stopped
