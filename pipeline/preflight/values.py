"""Values of veRL's keys that make no sense by themselves: an empty batch, a share above one, text.

Our own keys were checked when the config composed (`pipeline.settings`); here is what depends on several.
"""

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from pipeline.preflight.context import CheckContext
from pipeline.preflight.finding import Finding, error
from pipeline.settings.key import Key, Limits


def _rule(name: str, kind: type, **limits: Any) -> Key:
    return Key(name, kind, None, Limits("", **limits))


RULES = (
    _rule("trainer.total_training_steps", int, low=1),
    _rule("data.train_batch_size", int, low=1),
    _rule("actor_rollout_ref.rollout.n", int, low=1),
    _rule("actor_rollout_ref.rollout.tensor_model_parallel_size", int, low=1),
    _rule("actor_rollout_ref.rollout.gpu_memory_utilization", float, above=0, high=1),
    _rule("actor_rollout_ref.actor.ppo_mini_batch_size", int, low=1),
    _rule("actor_rollout_ref.actor.ppo_epochs", int, low=1),
    _rule("actor_rollout_ref.actor.optim.lr", float, above=0),
)
"""veRL's keys that checks of a training stage compute with."""


def can_be_reckoned_with(ctx: CheckContext) -> bool:
    """Whether every number is one: Python multiplies text as well, into gigabytes of it."""
    values = [OmegaConf.select(ctx.config, rule.name) for rule in RULES] if ctx.trains else []
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def check_values(ctx: CheckContext) -> Iterator[Finding]:
    """Every value in RULES must be of its kind and in its range, chunks have room, data be one file each."""
    config = ctx.config
    if ctx.stage == "prepare_data":
        from search.indexing.chunking import Chunking, ChunkingError

        try:
            Chunking(config.indexing.chunk_tokens, config.indexing.chunk_overlap)
        except ChunkingError as refused:
            yield error("indexing.chunk_overlap", str(refused), "change one of the two")
    for key in ("data.train_files", "data.val_files"):
        # veRL would read several files as one; our checks and manifests know the one they were given.
        if OmegaConf.is_list(OmegaConf.select(config, key)):
            yield error(key, "is a list, and one parquet file is read", "write them into one file first")
    if not ctx.trains:
        return
    for rule in RULES:
        if fault := rule.fault(OmegaConf.select(config, rule.name)):
            yield error(rule.name, fault, f"set it to {rule.allowed}")
    mode = config.data.get("truncation")
    if mode not in ("error", "left", "right", "middle"):
        yield error("data.truncation", f"is {mode!r}, which veRL does not know", "set it to error")
