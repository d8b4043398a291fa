"""A stage's settings and inputs, in a form to compare with an earlier start's record.

Our keys declare whether they count (`drzero.recipe.settings`). Of veRL's, those in
`drzero.recipe.settings.verl` count, and any others that you type. Inputs are compared by content.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.ops.process.isolated import in_child
from drzero.recipe.fingerprint import (
    fingerprint,
    fingerprint_checkpoint,
    fingerprint_index,
    fingerprint_model,
)
from drzero.recipe.overrides import for_stage, key_of, leaf_values
from drzero.recipe.settings import verl
from drzero.recipe.settings.schema import schema_of
from verl_ext.checkpoints import saved_step, step_folder


def significant_config(stage: str, config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings that can change a stage's results, by dotted key."""
    schema = schema_of(stage)
    names = schema.changing_results()
    if schema.has_verl:
        typed = (key_of(override) for override in for_stage(overrides, schema))
        counting = (*verl.RESULTS, *(key for key in typed if not key.startswith(verl.NEVER)))
        # Resolved one by one: some sixty of a thousand keys count, and resolving all takes a second.
        names += [
            key
            for key, value in leaf_values("", OmegaConf.to_container(config, resolve=False))
            if value != {}
            and key not in schema
            and key.startswith(counting)
            and not key.startswith(verl.NEVER)
        ]
    values = {name: OmegaConf.select(config, name) for name in names}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in values.items()
    }


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: before → now` for every setting that differs."""
    missing = "(not set)"
    values = {key: (before.get(key, missing), now.get(key, missing)) for key in sorted({*before, *now})}
    return [f"{key}: {was!r} → {new!r}" for key, (was, new) in values.items() if was != new]


def input_identities(stage: str, config: DictConfig) -> dict[str, str | None]:
    """Content identity of everything that a stage reads, None for a missing file."""
    from data.benchmarks import split_name

    if stage == "merge":
        return {"run": checkpoint_identity(config.source)}
    collection = in_child(fingerprint_index, config)
    if stage == "solver":
        return {
            "train": identity(config.data.train_files),
            "val": identity(config.data.val_files),
            "collection": collection,
            "start model": identity(config.actor_rollout_ref.model.path),
        }
    if stage == "evaluate":
        benchmarks = {f"benchmark {source}": identity(split_name(source)[1]) for source in config.benchmarks}
        return {"model": identity(config.solver.model_path), "collection": collection, **benchmarks}
    prompts = {"prompts": identity(config.data.train_files), "collection": collection}
    if stage == "synthesize":
        named = config.gates.benchmarks
        benchmarks = {f"benchmark {source}": identity(split_name(source)[1]) for source in named}
        solver = {"solver": identity(config.gates.open_book_model)} if config.gates.open_book else {}
        return {**prompts, "challenger": identity(config.challenger), **benchmarks, **solver}
    return {
        **prompts,
        "base model": identity(config.base_model),
        "opponent": identity(config.solver.model_path),
        "last challenger": checkpoint_identity(config.continue_from),
    }


def same_input(was: str | None, now: str | None) -> bool:
    """Whether two identities can mean the same content. A hub id gets its revision with the download."""
    if was is None or now is None or was == now:
        return was == now
    return was.partition("@")[0] == now.partition("@")[0] and ("@" in was) != ("@" in now)


def identity(source: str | Path) -> str | None:
    """The content at a path. A hub id or address is its own identity."""
    if str(source).startswith("hf://"):  # a benchmark on the hub
        return str(source)
    path = Path(source)
    if path.name.startswith("global_step_") and path.is_dir():
        is_empty = not any(file.is_file() for file in path.rglob("*"))
        return None if is_empty else f"{path.name} {fingerprint_checkpoint(path)}"
    if path.exists():
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        stats = [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return _content(path, tuple(stats))
    return None if path.is_absolute() else fingerprint_model(str(path))


def checkpoint_identity(run: str | None) -> str | None:
    """The identity of a run's last checkpoint, None without one."""
    step = saved_step(Path(run)) if run else 0
    return identity(step_folder(Path(str(run)), step)) if step else None


@functools.cache
def _content(path: Path, signature: tuple[Any, ...]) -> str:
    return fingerprint(path)
