"""The merged export: a checkpoint as a folder that Transformers and any inference server load.

veRL's own merger gathers the FSDP shards (it writes bfloat16); the tokenizer and the chat template come from
the model the run started from. The folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from omegaconf import DictConfig

from ops.process import Command
from ops.services import ServiceGroup
from ops.supervisor import run_supervised
from pipeline.stage_services import process_env
from pipeline.summary import saved_step

EXPORT = "hf"
"""Name of the export in a run's folder."""


def export_policy(config: DictConfig) -> Path:
    """Merge the run's last checkpoint into `{run.dir}/hf`, unless it is there already; returns the folder."""
    folder = Path(config.run.dir)
    step = saved_step(folder)
    target, partial = folder / EXPORT, folder / f"{EXPORT}.partial"
    checkpoint = folder / f"global_step_{step}" / "actor"
    # With the time: a run from the start writes the same step again.
    marker = f"{checkpoint.parent.name} {checkpoint.stat().st_mtime_ns}"
    if (target / "source_checkpoint").is_file() and (target / "source_checkpoint").read_text() == marker:
        return target
    shutil.rmtree(partial, ignore_errors=True)
    merger = Command(
        name="merger",
        command=(
            *(sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"),
            *("--local_dir", str(checkpoint), "--target_dir", str(partial)),
        ),
        log_path=folder / "logs" / "merger.log",
        env={"VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin", **process_env(config)},
    )
    run_supervised(merger, ServiceGroup([]))
    (partial / "source_checkpoint").write_text(marker)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target
