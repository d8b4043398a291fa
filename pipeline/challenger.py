"""The challenger stage: checks → services → veRL → export → summary.

    drzero challenger hardware=cpu trainer.total_training_steps=6

Rerunning with the same `run.name` resumes at the last checkpoint, by veRL's own mechanism, with the data
order of an unbroken run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from ops.process import Command
from ops.services import ServiceGroup
from ops.supervisor import run_supervised
from pipeline.checks import check_challenger
from pipeline.compose import RESOLVED, resolve, write_resolved
from pipeline.export import export_policy
from pipeline.stage_services import choose_ports, process_env, retrieval_spec, solver_spec
from pipeline.summary import metrics_path, print_summary, saved_step


def run_challenger(config: DictConfig) -> None:
    """Train the challenger to `trainer.total_training_steps`, then export and summarise.

    Raises CheckError, StoreError or PortTaken before anything starts, ServiceDied or ChildFailed when a part
    of the run ends.
    """
    choose_ports(config)
    config = resolve(config)
    check_challenger(config)
    folder, steps = Path(config.run.dir), config.trainer.total_training_steps
    if config.trainer.resume_mode == "auto" and saved_step(folder) >= steps:
        print(f"{folder} has all its {steps} steps: nothing to train; a new run needs another run.name")
    else:
        write_resolved(config)
        with ServiceGroup([retrieval_spec(config), solver_spec(config)]) as services:
            run_supervised(_trainer(config, folder), services)
    export_policy(config)
    print_summary(config)


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
        **process_env(config),
    }
