"""The training stages challenger and solver, and the parts `train` shares with them.

A run is: start → services → veRL → export → summary → result.

    drzero challenger iteration=1 hardware=8xh100 model=qwen2.5-7b     # HRPO against the last solver
    drzero solver iteration=1 hardware=8xh100 model=qwen2.5-7b         # GRPO on the synthesized questions

veRL runs as a child process on the resolved config and resumes from its own checkpoints. A trainer that runs
out of time, or stops at a collapse, exits with 0 and leaves a note (`drzero.ops.stop_time`). The stage then
raises OutOfTime or Collapsed.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from omegaconf import DictConfig

from drzero.checkpoints.resume import choose_start, start_step
from drzero.ops.causes import NO_HOST_MEMORY
from drzero.ops.console import say
from drzero.ops.errors import OutOfTime, RunFailed
from drzero.ops.files import remove_temporaries
from drzero.ops.process.child import Command
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE, OUT_OF_TIME
from drzero.ops.services.services import AnySpec, ServiceGroup
from drzero.ops.stop_time import Note, drop_note, read_note, require_time
from drzero.ops.supervisor import ChildFailed, Ended, NothingDone, Stalled, run_supervised
from drzero.ops.watchdog.diagnosis import ALIKE
from drzero.recipe.compose import RESOLVED, joins_cluster, verl_env, write_resolved
from drzero.recipe.metrics import read_metrics, spent_tokens
from drzero.recipe.overrides import assigned
from drzero.stages.flight_recorder import flight_recorder
from drzero.stages.flow import flow_monitor
from drzero.stages.nodes import node_watch, share_environment
from drzero.stages.result import write_result
from drzero.stages.services import VLLM_SILENT, check_and_resolve, search_spec, solver_spec
from drzero.stages.startup_signs import TRAINER
from drzero.stages.watch import PROGRESS, watch_plan, watched_env
from verl_ext.checkpoints import saved_step, settle_checkpoints, step_folder
from verl_ext.sglang import cpu

START_S = 60.0  # with less time left, the first step would not be reached, so nothing is started


LiveView = Callable[[DictConfig], AbstractContextManager[None]]


class Collapsed(RunFailed):
    """The policy collapsed, and the run stopped at the checkpoint after that step."""


def run_challenger(config: DictConfig, view: LiveView) -> None:
    """Train the challenger, then export and summarise. Raises PreflightFailed, else as `train`."""
    config = prepare(config, "challenger")
    train(config, [search_spec(config), solver_spec(config)], view)
    finish(config, exported(config))


def run_solver(config: DictConfig, view: LiveView) -> None:
    """Train the solver, with validations. The merge stage exports it."""
    config = prepare(config, "solver")
    train(config, [search_spec(config)], view)
    finish(config, {})


def prepare(config: DictConfig, stage: str) -> DictConfig:
    """Run preflight, then choose ports, files and checkpoint. Returns the resolved config."""
    config = check_and_resolve(config, stage)
    # veRL requires a validation file. `train` writes it.
    if stage != "train" and not (config.data.val_files and Path(str(config.data.val_files)).exists()):
        config.data.val_files = config.data.train_files
    _log_to_file(config.trainer)
    choose_start(config)
    return config


def _log_to_file(trainer: DictConfig) -> None:
    """Add veRL's file logger, whose metrics the summary, the page and later estimates read."""
    given = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    trainer.logger = list(dict.fromkeys(["file", *given]))


def train(config: DictConfig, services: Sequence[AnySpec], view: LiveView) -> None:
    """Train a prepared config to `trainer.total_training_steps`, last validation included.

    Does nothing if that is done. Raises AlreadyRunning, OutOfTime, ServiceDied, ChildFailed, NodeLost, or
    Collapsed if `collapse.policy` stops the run or stopped it at the checkpoint to resume.
    """
    folder, steps = Path(config.run.dir), config.trainer.total_training_steps
    with HeldLock(folder / "lock"):
        _tidy(config, folder)
        resumes = config.trainer.resume_mode != "disable"
        if resumes and saved_step(folder) >= steps and not config.trainer.val_only:
            print(f"{folder} has all its {steps} steps: nothing to train; a new run needs another run.name")
            return
        _refuse_to_resume_a_collapse(config, folder)
        require_time(config.run.name, START_S)
        write_for_trainer(config, folder)
        events = EventLog(folder / "logs" / EVENTS_FILE)
        try:
            with view(config), ServiceGroup(services, events=events) as group:
                _until_done(config, folder, group)
        except Collapsed:
            from drzero.stages.summary import print_summary

            print_summary(config)  # a live view would have drawn over it
            raise


def _until_done(config: DictConfig, folder: Path, services: ServiceGroup) -> None:
    """Run the trainer to its end. Restart one that may be resumed as often as `watchdog.policy` says."""
    # With `report`, only the loss of a worker stops a run.
    resumes = {"resume": config.watchdog.resumes, "report": 1, "stop": 0}[config.watchdog.policy]
    for left in range(resumes, -1, -1):
        try:
            # A restarted trainer counts from zero, so each start needs its own monitor.
            with (
                flow_monitor(config) as flow,
                flight_recorder(folder) as recorder,
                node_watch(config) as nodes,
            ):
                trainer = trainer_command(config, folder, recorder)
                run_supervised(trainer, services, plan=watch_plan(config, flow), nodes=nodes)
            _raise_if_ended_early(config, folder, services)
            return
        except NothingDone:
            # The start may have used up the time.
            _raise_if_ended_early(config, folder, services)
            raise
        except (Stalled, ChildFailed) as ended:
            if not left or not _may_resume(ended):
                raise
            step, what = max(saved_step(folder), start_step(config) or 0), ended.summary.partition("\n")[0]
            say("watchdog", f"{what}; restarting after step {step} ({left - 1} restarts left)")
        require_time(config.run.name, START_S)
        if saved_step(folder) > (start_step(config) or 0):
            config.trainer.resume_mode = "auto"
        _tidy(config, folder)
        write_for_trainer(config, folder)


def _may_resume(ended: Ended) -> bool:
    """Whether another start may help: after a stall, or if the trainer saw a kill for lack of memory."""
    return ended.pattern == NO_HOST_MEMORY or (isinstance(ended, Stalled) and ended.pattern != ALIKE)


def write_for_trainer(config: DictConfig, folder: Path) -> None:
    """Write the trainer's config."""
    if joins_cluster(config):  # whose workers do not inherit the trainer's environment
        share_environment(config, trainer_env(config, folder))
    write_resolved(config)


def _raise_if_ended_early(config: DictConfig, folder: Path, services: ServiceGroup) -> None:
    """Raise OutOfTime or Collapsed if the trainer left a note. A rerun needs the note of a collapse."""
    if (note := read_note(folder)) is None:
        return
    if note.collapsed:
        error = _collapsed(config, note)
        services.events.add("end", "trainer", str(error), advice="see the alarms above")
        raise error
    drop_note(folder)
    message = f"out of time after step {note.step} of {config.trainer.total_training_steps}: {note.why}"
    services.events.add(OUT_OF_TIME, "trainer", message, step=note.step)
    advice = "rerun to resume"
    if config.trainer.resume_mode == "disable":
        advice = "trainer.resume_mode=disable, so a rerun starts from step 0"
    raise OutOfTime(f"{message}; {advice}")


def _refuse_to_resume_a_collapse(config: DictConfig, folder: Path) -> None:
    note, start = read_note(folder), start_step(config)
    if note is None:
        return
    if note.step == (saved_step(folder) if start is None else start):
        if config.collapse.policy == "stop":
            raise _collapsed(config, note)
        say(
            "collapse",
            f"resuming after step {note.step} despite the collapse (collapse.policy=warn): {note.why}",
        )
    drop_note(folder)


def _collapsed(config: DictConfig, note: Note) -> Collapsed:
    return Collapsed(
        f"stopped at step {note.step} of {config.trainer.total_training_steps}, which is saved "
        f"(collapse.policy=stop): {note.why}. A rerun stops here too. collapse.policy=warn resumes after "
        f"that step; another run.name (in a loop: --from {config.run.name}) starts again"
    )


def exported(config: DictConfig) -> dict[str, Path]:
    """Export the policy of a finished run as a model folder, unless the run was to save nothing."""
    if not _last_saved(config):
        say("export", "nothing to export: the run saved no checkpoint of its last step (trainer.save_freq)")
        return {}
    from drzero.checkpoints.export import export_policy  # with torch, which a waiting process must not hold

    return {"export": export_policy(config, Path(config.run.dir))}


def _last_saved(config: DictConfig) -> int:
    """The step of a finished run's checkpoint; 0 if it was to save nothing, whatever a stop has saved."""
    step, trainer = saved_step(Path(config.run.dir)), config.trainer
    return 0 if trainer.save_freq <= 0 and step < trainer.total_training_steps else step


def finish(config: DictConfig, outputs: Mapping[str, Path]) -> None:
    """Print the summary and write the result: the last checkpoint, if any, and `outputs`."""
    from drzero.stages.summary import print_summary

    folder = Path(config.run.dir)
    saved = {"checkpoint": step_folder(folder, step)} if (step := _last_saved(config)) else {}
    write_result(config, {**saved, **outputs}, spent_tokens(folder), print_summary(config))


def _tidy(config: DictConfig, folder: Path) -> None:
    for line in settle_checkpoints(folder, start_step(config)):
        say("checkpoints", line)
    if (note := read_note(folder)) and not note.collapsed:
        drop_note(folder)
    for place in (folder, folder / "dumps"):
        remove_temporaries(place)
    for old in (folder / PROGRESS).glob("*.json"):
        old.unlink()
    _plan_validation(config, folder)


def _plan_validation(config: DictConfig, folder: Path) -> None:
    """On resume, run only the validation that a kill between veRL's save and its validation skipped."""
    trainer, step = config.trainer, saved_step(folder)
    trainer.val_only = False
    if trainer.resume_mode != "auto" or not step or trainer.test_freq <= 0:
        return
    is_last = step >= trainer.total_training_steps
    due = is_last or step % trainer.test_freq == 0
    scored = read_metrics(folder).get(step, {}).keys() & {"drzero/val/em", "drzero/val/success"}
    trainer.val_before_train = due and not scored
    trainer.val_only = is_last and trainer.val_before_train


def trainer_command(config: DictConfig, folder: Path, recorder: Mapping[str, str]) -> Command:
    """veRL's trainer on the resolved config in `folder`; `recorder` is `flight_recorder`'s environment."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(folder)]
    command += ["--config-name", RESOLVED]
    # Hydra would write its output folder and log file to the working directory.
    command += [
        assigned("hydra.run.dir", str(folder / "logs")),
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
    ]
    return Command(
        name="trainer",
        command=tuple(command),
        log_path=folder / "logs" / "trainer.log",
        env={**trainer_env(config, folder), **recorder},
        startup_signs=TRAINER,
    )


def trainer_env(config: DictConfig, folder: Path) -> dict[str, str]:
    """The environment of every process of the trainer. It holds no secret."""
    rollout = config.actor_rollout_ref.rollout
    is_sglang_on_cpu = rollout.name == "sglang" and config.machine.device == "cpu"
    engine = cpu.environment(rollout.tensor_model_parallel_size) if is_sglang_on_cpu else {}
    return {
        "PYTHONUNBUFFERED": "1",
        # Nothing may leave the machine, usage reports included.
        "RAY_USAGE_STATS_ENABLED": "0",
        **VLLM_SILENT,
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_MODE": os.environ.get("WANDB_MODE")
        or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
        **engine,
        **watched_env(config),
        **verl_env(config),
    }
