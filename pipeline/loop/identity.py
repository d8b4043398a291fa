"""What a stage's results depend on: its settings and its inputs, in a form that can be compared.

Of a config's hundreds of keys few change results; where something runs, how fast, in which batches and with
how much memory does not. Which of our keys count is part of their declaration (`pipeline.settings`,
`drzero config`); of veRL's keys those in `pipeline.settings.verl`, and any other that the command line sets.
Inputs are compared by content, not by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.benchmarks import HUB_PREFIX
from pipeline.fingerprint import (
    fingerprint,
    fingerprint_checkpoint,
    fingerprint_collection,
    fingerprint_model,
)
from pipeline.overrides import for_stage, key_of
from pipeline.settings import verl
from pipeline.settings.schema import schema_of
from pipeline.stages.summary import saved_step

_CHECKPOINT = "global_step_"


def significant_config(stage: str, config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings that can change a stage's results, by dotted key."""
    schema = schema_of(stage)
    names = schema.changing_results()
    if schema.has_verl:
        typed = (key_of(override) for override in for_stage(overrides, schema))
        counting = (*verl.RESULTS, *(key for key in typed if not key.startswith(verl.NEVER)))
        # Resolved one by one: of a thousand keys some sixty count, and resolving all takes a second.
        names += [
            key
            for key in _flatten(OmegaConf.to_container(config, resolve=False))
            if key not in schema and key.startswith(counting) and not key.startswith(verl.NEVER)
        ]
    return {name: _plain(OmegaConf.select(config, name)) for name in names}


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: was → is` for every setting that differs."""
    missing = "(not set)"
    return [
        f"{key}: {before.get(key, missing)!r} → {now.get(key, missing)!r}"
        for key in sorted({*before, *now})
        if before.get(key, missing) != now.get(key, missing)
    ]


def input_identities(stage: str, config: DictConfig) -> dict[str, str | None]:
    """Content identity of everything that a stage reads; None for what is not there (yet)."""
    named: dict[str, Any] = {
        "challenger": lambda: {
            "prompts": identity(config.data.train_files),
            "collection": _collection(config),
            "base model": identity(config.base_model),
            "opponent": identity(config.solver.model_path),
            "last challenger": checkpoint_identity(config.continue_from),
        },
        "synthesize": lambda: {
            "prompts": identity(config.data.train_files),
            "collection": _collection(config),
            "challenger": identity(config.challenger),
            **{f"benchmark {source}": identity(source) for source in config.gates.benchmarks},
        },
        "solver": lambda: {
            "train": identity(config.data.train_files),
            "val": identity(config.data.val_files),
            "collection": _collection(config),
            "start model": identity(config.actor_rollout_ref.model.path),
        },
        "merge": lambda: {"run": checkpoint_identity(config.source)},
        "evaluate": lambda: {
            "model": identity(config.solver.model_path),
            "collection": _collection(config),
            **{f"benchmark {source}": identity(source) for source in config.benchmarks},
        },
    }
    return dict(named[stage]())


def same_input(was: str | None, now: str | None) -> bool:
    """Whether two identities can be of one content: a hub id learns its revision with the download."""
    if was is None or now is None or was == now:
        return was == now
    return was.partition("@")[0] == now.partition("@")[0] and ("@" in was) != ("@" in now)


def identity(source: str | Path) -> str | None:
    """What is at a path, by content; a hub id or address that is no path is its own identity."""
    if str(source).startswith(HUB_PREFIX):
        return str(source)
    path = Path(source)
    if path.name.startswith(_CHECKPOINT) and path.is_dir():
        is_empty = not any(file.is_file() for file in path.rglob("*"))
        return None if is_empty else f"{path.name} {fingerprint_checkpoint(path)}"
    if path.exists():
        return _content(path, _stat_signature(path))
    return None if path.is_absolute() else fingerprint_model(str(path))


def checkpoint_identity(run: str | None) -> str | None:
    """That of a run's last checkpoint; None when there is none (any more)."""
    step = saved_step(Path(run)) if run else 0
    return identity(Path(str(run)) / f"{_CHECKPOINT}{step}") if step else None


def _collection(config: DictConfig) -> str:
    return fingerprint_collection(config.chroma.path, config.chroma.collection)


@functools.cache
def _content(path: Path, signature: str) -> str:
    """The content hash, computed once a process as long as no file's size or time changes."""
    return fingerprint(path)


def _stat_signature(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return str(hash(tuple(stats)))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flatten(value, f"{prefix}{key}.")
    return flat
