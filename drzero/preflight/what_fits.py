"""The changes with which a stage fits its machine, found by trying them on the memory ledger."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from drzero.preflight.batch import micro_batch_key, smallest_micro_batch
from drzero.preflight.context import CheckContext
from drzero.preflight.memory_ledger import lora_rank
from drzero.recipe.gpu_prices import MOST_MEMORY_MIB

CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
_LEAST_SLOTS = 8  # of a GPU; fewer leave it idle
_MEMORY_STEP_MIB = 8192
_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.offload_policy"
_ADAPTER: dict[str, Any] = {
    "actor_rollout_ref.model.lora_rank": 32,
    "actor_rollout_ref.model.lora_alpha": 32,
    "actor_rollout_ref.model.lora.merge": True,
}

Fits = Callable[[CheckContext], bool]


def what_fits(ctx: CheckContext, fits: Fits) -> str:
    """The end of a sentence with overrides that `fits` accepts. Empty if none does.

    Smaller batches come first, as they change no result. Then, on a CPU, recomputed activations, and on GPUs
    whole weights in host memory and an adapter.
    """
    config, on_gpu = ctx.config, ctx.machine.gpu is not None
    if (smaller := _changes(ctx, {}, fits)) is not None:
        return f"set {written(smaller)}" if smaller else ""
    if not on_gpu:
        recomputed = _changes(ctx, {CHECKPOINTING: True}, fits) if ctx.trains else None
        return f"set {written(recomputed)}" if recomputed else ""
    ways = []
    if not OmegaConf.select(config, _OFFLOAD) and (kept := _changes(ctx, {_OFFLOAD: True}, fits)):
        ways.append(f"whole weights with {written(kept)}")
    if not lora_rank(config) and (adapter := _changes(ctx, _ADAPTER, fits)):
        ways.append(f"an adapter with {written(adapter)}")
    return f"train {', or '.join(ways)}" if ways else ""


def changed(ctx: CheckContext, changes: dict[str, Any]) -> CheckContext:
    """The stage with some keys changed."""
    config = pickle.loads(pickle.dumps(ctx.config))  # OmegaConf's own copy takes longer
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return replace(ctx, config=config)


def _changes(ctx: CheckContext, fixed: dict[str, Any], fits: Fits) -> dict[str, Any] | None:
    """`fixed` and as little else as `fits` needs, or None if even the most is too little.

    All ladders are descended together, so that no part of the run becomes much slower than the others.
    """
    ladders = dict(_ladders(ctx))
    for depth in range(max(map(len, ladders.values()), default=1)):
        chosen = fixed | {key: values[min(depth, len(values) - 1)] for key, values in ladders.items()}
        if fits(changed(ctx, chosen)):
            break
    else:
        return None
    for key, values in ladders.items():
        chosen[key] = next(one for one in values if fits(changed(ctx, chosen | {key: one})))
    return {key: value for key, value in chosen.items() if OmegaConf.select(ctx.config, key) != value}


def _ladders(ctx: CheckContext) -> Iterator[tuple[str, list[int]]]:
    """What may be changed, each key with its values from today's to the furthest."""
    config, on_gpu = ctx.config, ctx.machine.gpu is not None
    least = _LEAST_SLOTS if on_gpu else 1
    if ctx.trains:
        yield _halved(ctx, micro_batch_key(config), smallest_micro_batch(config))
        if not on_gpu or config.actor_rollout_ref.rollout.name == "reference":
            yield _halved(ctx, "actor_rollout_ref.rollout.max_num_seqs", least)
    if ctx.serves_model and (not on_gpu or config.solver.engine == "reference"):
        yield _halved(ctx, "solver.max_batch_size", least)
    if config.compute.provider != "local" and (now := config.compute.memory):
        more = range(now, MOST_MEMORY_MIB, _MEMORY_STEP_MIB)
        yield "compute.memory", [*more, max(now, MOST_MEMORY_MIB)]


def _halved(ctx: CheckContext, key: str, least: int) -> tuple[str, list[int]]:
    values = [int(OmegaConf.select(ctx.config, key))]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return key, values


def written(changes: dict[str, Any]) -> str:
    """The changes as overrides."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()
    )
