"""Chooses the checkpoint that a training run starts from: its own last one, the last iteration's, or none.

veRL loads a checkpoint unchecked. Another model's ends in pages of shape errors, one for other devices in a
missing file, a missing folder in a silent start from scratch. Here each is one sentence before the start.
"""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.checkpoints.reading import read_json, read_settings
from drzero.ops.console import say
from drzero.ops.process.isolated import in_child
from drzero.recipe.errors import CheckError
from drzero.recipe.settings.schema import run_keys
from verl_ext.checkpoints import TRACKER, is_whole, saved_step, shard_count, step_folder

_IDENTITY = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")
_FROM_BASE = "set continue_from=null to start from base_model"


def choose_start(config: DictConfig) -> None:
    """Check the checkpoint to start from, and set `trainer.resume_…` for another run's. Raises CheckError."""
    checkpoint = in_child(find_start, config)
    is_named = config.trainer.resume_mode == "resume_path"
    if checkpoint is not None and (is_named or checkpoint.parent != Path(config.run.dir)):
        step = int(checkpoint.name.rpartition("_")[2])
        say(config.run.name, f"continuing from {checkpoint}: the first step is {step + 1}")
        config.trainer.resume_mode = "resume_path"
        config.trainer.resume_from_path = str(checkpoint)


def find_start(config: DictConfig) -> Path | None:
    """The checkpoint to start at: the named one, the run's last or `continue_from`'s. Raises CheckError."""
    if config.trainer.resume_mode == "resume_path":
        return _named_checkpoint(config)
    if config.trainer.resume_mode != "auto":
        return None
    folder = Path(config.run.dir)
    if not saved_step(folder):
        return None if config.get("continue_from") is None else _last_runs_checkpoint(config)
    in_loop = f"(in a loop: --from {folder.name})"
    for key, was in (read_settings(folder, run_keys()) or {}).items():
        if was != (now := OmegaConf.select(config, key)):
            raise CheckError(
                f"{folder} holds a run with {key}={was}, and this one has {now}: set another run.name "
                f"{in_loop}"
            )
    checkpoint = step_folder(folder, saved_step(folder))
    check_checkpoint(checkpoint, config, f"set another run.name to start from scratch {in_loop}")
    return checkpoint


def start_step(config: DictConfig) -> int | None:
    """The step a run starts at by its settings, None for its last checkpoint's."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        named = re.fullmatch(r"global_step_(\d+)", Path(str(trainer.resume_from_path)).name)
        return int(named[1]) if named else None
    return 0 if trainer.resume_mode == "disable" else None


def _named_checkpoint(config: DictConfig) -> Path:
    path = Path(str(config.trainer.resume_from_path))
    if start_step(config) is None or not is_whole(path):
        raise CheckError(
            f"trainer.resume_from_path={path} is not a complete checkpoint (…/global_step_N): correct it, or "
            "leave out trainer.resume_mode to resume from the run's last"
        )
    check_checkpoint(path, config, "name another checkpoint")
    return path


def _last_runs_checkpoint(config: DictConfig) -> Path:
    source = Path(config.continue_from)
    step, steps = saved_step(source), config.trainer.total_training_steps
    in_loop = f"(in a loop: --from {source.name})"
    if not step:
        raise CheckError(
            f"continue_from: there is no checkpoint in {source}: train the last iteration's challenger "
            f"first {in_loop}, or {_FROM_BASE}"
        )
    if step >= steps:
        raise CheckError(
            f"continue_from: {source} is at step {step} already and trainer.total_training_steps={steps} "
            "counts from the first iteration on: raise it, or steps_per_iteration as that run had it"
        )
    checkpoint = step_folder(source, step)
    check_checkpoint(checkpoint, config, f"{_FROM_BASE} {in_loop}")
    return checkpoint


def check_checkpoint(checkpoint: Path, config: DictConfig, otherwise: str) -> None:
    """Raise CheckError for an incomplete or unfit one. `otherwise`: the setting to start without it."""
    if not is_whole(checkpoint):
        raise CheckError(
            f"{checkpoint} is recorded as the last checkpoint, but it is missing or incomplete: restore it, "
            f"remove {TRACKER} next to it to resume from the newest whole one, or {otherwise}"
        )
    actor, path = checkpoint / "actor", config.actor_rollout_ref.model.path
    saved = read_json(actor / "huggingface" / "config.json", "the model that was trained")
    from transformers import AutoConfig  # slow to import, and most starts have no checkpoint

    model = AutoConfig.from_pretrained(path).to_dict()
    for name in _IDENTITY:
        was, now = saved.get(name), model.get(name)
        if was != now:
            raise CheckError(
                f"{checkpoint} is of another model than {path}: {name} is {_short(was)} there and "
                f"{_short(now)} here. Set base_model to the model it was trained from, or {otherwise}"
            )
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if (world_size := shard_count(actor)) != devices:
        raise CheckError(
            f"{checkpoint} is in shards for {world_size} devices, and this run has {devices} "
            "(trainer.n_gpus_per_node × trainer.nnodes): resume on as many as before"
        )


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
