"""What the two training stages share: settle → services → veRL → summary → result.

veRL runs as a child on the resolved config; it resumes by its own mechanism, once the run's folder has been
put in order after a kill (`verl_ext.checkpoints`). A trainer that runs out of time ends well, with a note in
the run's folder (`verl_ext.stop_time`); here that becomes the stage's OutOfTime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from ops.events import EVENTS_FILE, OUT_OF_TIME, EventLog
from ops.lock import HeldLock
from ops.logs import say
from ops.process import Command
from ops.services import ServiceGroup, ServiceSpec
from ops.supervisor import NothingDone, Stalled, run_supervised
from pipeline.compose import RESOLVED, write_resolved
from pipeline.flow import flow_monitor
from pipeline.out_of_time import OutOfTime, require_time
from pipeline.stage_result import write_result
from pipeline.stage_services import process_env
from pipeline.summary import metrics_path, print_summary, read_metrics, spent_tokens, summarise
from pipeline.watch import FLIGHT, PROGRESS, watch_plan, watched_env
from verl_ext.checkpoints import saved_step, settle_checkpoints, step_folder
from verl_ext.stop_time import NOTE, take_note

START_S = 60.0
"""With less than this left, services and trainer are not started: they would not come to a first step."""


def train(config: DictConfig, services: Sequence[ServiceSpec]) -> None:
    """Bring a run to `trainer.total_training_steps`, its last validation included; nothing when it is there.

    `config` is resolved and checked. Raises AlreadyRunning when another process is at this run, OutOfTime
    when the stop time ends it at a checkpoint, ServiceDied or ChildFailed when a part of the run ends.
    """
    folder, steps = Path(config.run.dir), config.trainer.total_training_steps
    with HeldLock(folder / "lock"):
        _tidy(folder)
        _plan_validation(config, folder)
        resumes = config.trainer.resume_mode != "disable"
        if resumes and saved_step(folder) >= steps and not config.trainer.val_only:
            print(f"{folder} has all its {steps} steps: nothing to train; a new run needs another run.name")
            return
        require_time(config.run.name, START_S)
        write_resolved(config)
        events = EventLog(folder / "logs" / EVENTS_FILE)
        with ServiceGroup(services, events=events) as group:
            _until_done(config, folder, group)


def _until_done(config: DictConfig, folder: Path, services: ServiceGroup) -> None:
    """Run the trainer to its end; by policy one that stands still starts again from its last checkpoint."""
    resumes = config.watchdog.resumes if config.watchdog.policy == "resume" else 0
    for left in range(resumes, -1, -1):
        try:
            # A restarted trainer counts anew, so each start has a monitor of its own.
            with flow_monitor(config):
                run_supervised(_trainer(config, folder), services, plan=watch_plan(config))
            _raise_if_out_of_time(config, folder, services)
            return
        except NothingDone:
            # Its start may have taken all the time there was.
            _raise_if_out_of_time(config, folder, services)
            raise
        except Stalled as stalled:
            if not left:
                raise
            say(
                "watchdog",
                f"{stalled.summary}; starting again from the last checkpoint, {left - 1} times more",
            )
        require_time(config.run.name, START_S)
        _tidy(folder)
        _plan_validation(config, folder)
        write_resolved(config)


def _raise_if_out_of_time(config: DictConfig, folder: Path, services: ServiceGroup) -> None:
    """Raise OutOfTime where the trainer has left a note that it ended for that."""
    if (note := take_note(folder)) is None:
        return
    told = f"out of time after step {note.step} of {config.trainer.total_training_steps}: {note.why}"
    services.events.add(OUT_OF_TIME, "trainer", told, step=note.step)
    anew = config.trainer.resume_mode == "disable"
    advice = "trainer.resume_mode=disable, so a rerun starts anew" if anew else "rerun to go on"
    raise OutOfTime(f"{told}; {advice}")


def finish(config: DictConfig, outputs: Mapping[str, Path]) -> None:
    """Print the summary and say that the stage is finished; `outputs` come beside the last checkpoint."""
    folder = Path(config.run.dir)
    print_summary(config)
    steps = read_metrics(folder)
    checkpoint = step_folder(folder, saved_step(folder))
    write_result(
        config, {"checkpoint": checkpoint, **outputs}, spent_tokens(folder), summarise(steps, config.method)
    )


def _tidy(folder: Path) -> None:
    """Put a run's folder in order after whatever ended the last start."""
    for line in settle_checkpoints(folder):
        say("checkpoints", line)
    for partial in (folder / "dumps").glob("*.partial"):
        partial.unlink()
    for note in folder.glob(f"{NOTE}*"):
        note.unlink()
    for old in (folder / PROGRESS).glob("*.json"):
        old.unlink()
    # torch opens its dumps and pipes there and makes no folder.
    (folder / FLIGHT).mkdir(exist_ok=True)


def _plan_validation(config: DictConfig, folder: Path) -> None:
    """Validate at the start only what the last start did not come to: the model as it was saved.

    veRL saves a step before it validates it, so a kill in between would lose that validation for good; after
    the last step there is nothing left but to make up for it.
    """
    trainer, step = config.trainer, saved_step(folder)
    trainer.val_only = False
    if trainer.resume_mode != "auto" or not step or trainer.test_freq <= 0:
        return
    is_last = step >= trainer.total_training_steps
    due = is_last or step % trainer.test_freq == 0
    trainer.val_before_train = due and "drzero/val/em" not in read_metrics(folder).get(step, {})
    trainer.val_only = is_last and trainer.val_before_train


def _trainer(config: DictConfig, folder: Path) -> Command:
    return Command(
        name="trainer",
        command=(
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *("--config-path", str(folder), "--config-name", RESOLVED),
            # Hydra's own output folder and log file would land in the working directory.
            *("hydra.run.dir=" + str(folder / "logs"), "hydra.output_subdir=null", "hydra/job_logging=none"),
        ),
        log_path=folder / "logs" / "trainer.log",
        env=_trainer_env(config, folder),
    )


def _trainer_env(config: DictConfig, folder: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # veRL warns in every process of engines that are not installed.
        "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",
        # Ray's usage reports would be the only thing that leaves the machine.
        "RAY_USAGE_STATS_ENABLED": "0",
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "VERL_FILE_LOGGER_PATH": str(metrics_path(folder)),
        "WANDB_DIR": str(folder),
        "WANDB_MODE": os.environ.get("WANDB_MODE")
        or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
        **watched_env(config),
        **process_env(config),
    }
