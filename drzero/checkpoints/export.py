"""The merged export: a checkpoint as a folder that Transformers and any inference server load.

veRL's merger writes bfloat16 and leaves an adapter unmerged, so the weights are written again if the
checkpoint or `run.export_dtype` needs more. The folder appears whole and checked, or not at all.
"""

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from safetensors.torch import save_file

from drzero.checkpoints.reading import read_json
from drzero.checkpoints.verify import ExportCheck, check_export
from drzero.checkpoints.weights import FsdpCheckpoint
from drzero.ops.artefacts import announce
from drzero.ops.files import publish, recover, staging_folder
from drzero.ops.process.child import Command
from drzero.ops.services.services import ServiceGroup
from drzero.ops.stop_time import require_time
from drzero.ops.supervisor import run_supervised
from drzero.recipe.compose import verl_env
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint_checkpoint

ABOUT = "export.json"  # names the checkpoint of an export, and what was checked
MERGER_DTYPE = "bfloat16"
_MARGIN_BYTES = 64 * 2**20  # tokenizer, config, logs
_LEAST_S, _WEIGHTS_PER_S = 60.0, 20e6
"""A disk of some 200 MB/s reads, writes and reads again so many weights a second."""


def export_policy(config: DictConfig, run: Path) -> Path:
    """Merge the last checkpoint unless done. Raises OutOfTime, CheckError, AlreadyWriting, ChildFailed."""
    target = Path(config.run.export_dir)
    recover(target)
    checkpoint = FsdpCheckpoint(run)
    step = checkpoint.step
    # By content: a rerun from the start writes the same step again, and a copy has other times.
    content = fingerprint_checkpoint(checkpoint.folder)
    dtype = config.run.export_dtype
    source = {"run": step.parent.name, "step": step.name, "content": content, "dtype": dtype}
    if target.exists() and _about(target)["source"] == source:
        return target
    weights = checkpoint.layout.size
    require_time(f"the export {target.name}", _LEAST_S + weights / _WEIGHTS_PER_S)
    target.parent.mkdir(parents=True, exist_ok=True)
    free, size = shutil.disk_usage(target.parent).free, getattr(torch, dtype).itemsize * weights
    if free < size + _MARGIN_BYTES:
        raise CheckError(
            f"{target.parent} has {free / 2**30:.2f} GiB free and the export takes {size / 2**30:.2f}: "
            "make room, set run.export_dir, or halve it with run.export_dtype=bfloat16"
        )
    with staging_folder(target) as folder:
        run_supervised(_merger(config, checkpoint.folder, folder), ServiceGroup([]))
        if dtype != MERGER_DTYPE or checkpoint.adapters:
            _write_weights(checkpoint, folder, dtype)
        check = check_export(checkpoint, folder)
        (folder / ABOUT).write_text(json.dumps({"source": source, "check": asdict(check)}, indent=1))
        _make_readable(folder)
        publish(folder, target)
        announce(target)
    return target


def read_check(export: Path) -> ExportCheck:
    """The check made with the export."""
    return ExportCheck(**_about(export)["check"])


def _about(export: Path) -> dict[str, Any]:
    if not (export / ABOUT).is_file():
        raise CheckError(
            f"{export} exists and is not our export (no {ABOUT} in it): move it away, or set run.export_dir"
        )
    about = read_json(export / ABOUT, "what the export is of")
    if not about.keys() >= {"source", "check"}:
        raise CheckError(f"{export / ABOUT} does not say what the export is of: move {export} away")
    return about


def _merger(config: DictConfig, checkpoint: Path, target: Path) -> Command:
    folders = ("--local_dir", str(checkpoint), "--target_dir", str(target))
    return Command(
        name="merger",
        command=(sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", *folders),
        log_path=Path(config.run.dir) / "logs" / "merger.log",
        env=verl_env(config),
    )


def _write_weights(checkpoint: FsdpCheckpoint, export: Path, dtype: str) -> None:
    """Replace the merger's weights by the checkpoint's in `dtype`, file by file, with its adapter added."""
    for file in sorted(export.glob("*.safetensors")):
        with safe_open(file, framework="pt") as merged:
            names = list(merged.keys())
        weights = {name: checkpoint.tensor(name).to(getattr(torch, dtype)) for name in names}
        save_file(weights, file, metadata={"format": "pt"})
    # No server reads it next to the weights.
    shutil.rmtree(export / "lora_adapter", ignore_errors=True)
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    config |= {name: dtype for name in ("dtype", "torch_dtype") if name in config}
    (export / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _make_readable(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        file.chmod(0o666 & ~mask)
