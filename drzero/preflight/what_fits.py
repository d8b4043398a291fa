"""The changes with which a training fits its machine, found by trying them on the memory ledger."""

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.preflight.batch import micro_batch_key, smallest_micro_batch
from drzero.preflight.memory_ledger import lora_rank
from drzero.recipe.gpu_prices import MOST_MEMORY_MIB

_ROLLOUT = "actor_rollout_ref.rollout"
_LEAST_SLOTS = 8
_MEMORY_STEP_MIB = 8192
_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.offload_policy"
_ADAPTER: dict[str, Any] = {
    "actor_rollout_ref.model.lora_rank": 32,
    "actor_rollout_ref.model.lora_alpha": 32,
    "actor_rollout_ref.model.lora.merge": True,
}

Fits = Callable[[DictConfig], bool]


def what_fits(config: DictConfig, fits: Fits) -> str:
    """The end of a sentence with overrides that `fits` accepts. Empty if none does.

    Smaller batches come first, as they change no result, then whole weights in host memory, and an adapter.
    """
    if (smaller := _changes(config, {}, fits)) is not None:
        return f"set {_written(smaller)}" if smaller else ""
    ways = []
    if not OmegaConf.select(config, _OFFLOAD) and (kept := _changes(config, {_OFFLOAD: True}, fits)):
        ways.append(f"whole weights with {_written(kept)}")
    if not lora_rank(config) and (adapter := _changes(config, _ADAPTER, fits)):
        ways.append(f"an adapter with {_written(adapter)}")
    return f"train {', or '.join(ways)}" if ways else ""


def _changes(config: DictConfig, fixed: dict[str, Any], fits: Fits) -> dict[str, Any] | None:
    """`fixed` and as little else as `fits` needs, or None if even the most is too little."""
    ladders = dict(_ladders(config))
    chosen = fixed | {key: values[-1] for key, values in ladders.items()}
    if not fits(_with(config, chosen)):
        return None
    for key, values in ladders.items():
        chosen[key] = next(one for one in values if fits(_with(config, chosen | {key: one})))
    return {key: value for key, value in chosen.items() if OmegaConf.select(config, key) != value}


def _ladders(config: DictConfig) -> Iterator[tuple[str, list[int]]]:
    """What may be changed, each key with its values from today's to the furthest."""
    yield _halved(config, micro_batch_key(config), smallest_micro_batch(config))
    if config.actor_rollout_ref.rollout.name == "reference":
        yield _halved(config, f"{_ROLLOUT}.max_num_seqs", _LEAST_SLOTS)
    if config.method == "hrpo" and config.solver.engine == "reference":
        yield _halved(config, "solver.max_batch_size", _LEAST_SLOTS)
    if config.compute.provider != "local" and (now := config.compute.memory):
        more = range(now, MOST_MEMORY_MIB, _MEMORY_STEP_MIB)
        yield "compute.memory", [*more, max(now, MOST_MEMORY_MIB)]


def _halved(config: DictConfig, key: str, least: int) -> tuple[str, list[int]]:
    values = [int(OmegaConf.select(config, key))]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return key, values


def _with(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    changed = config.copy()
    for key, value in changes.items():
        OmegaConf.update(changed, key, value)
    return changed


def _written(changes: dict[str, Any]) -> str:
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()
    )
