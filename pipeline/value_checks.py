"""Values that make no sense by themselves: a batch of nothing, a share above one, text for a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.finding import Finding, error
from search.wire import MAX_TOPK

if TYPE_CHECKING:
    from pipeline.subject import Subject


@dataclass(frozen=True)
class Rule:
    """What a key's value must be."""

    whole: bool
    low: float
    high: float = math.inf
    above_low: bool = False
    """Whether `low` itself is too little."""
    stages: tuple[str, ...] = ()
    """Where it counts; everywhere if empty."""

    def is_number(self, value: Any) -> bool:
        """Whether a value is of the kind."""
        return not isinstance(value, bool) and isinstance(value, int if self.whole else (int, float))

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, None if nothing is."""
        if not self.is_number(value):
            return f"is {value!r}, not a {'whole ' if self.whole else ''}number"
        if value < self.low or (self.above_low and value == self.low) or value > self.high:
            return f"is {value}, not {self}"
        return None

    def __str__(self) -> str:
        at_most = "" if self.high == math.inf else f" and at most {self.high:g}"
        return f"{'above' if self.above_low else 'at least'} {self.low:g}{at_most}"


_TRAINING, _INDEXING = ("challenger", "solver"), ("prepare_data",)
_COUNT, _POSITIVE = Rule(True, 1), Rule(False, 0, above_low=True)
_SHARE = Rule(False, 0, 1, above_low=True)
_TRAINED_COUNT = Rule(True, 1, stages=_TRAINING)
_TRAINED_POSITIVE = Rule(False, 0, above_low=True, stages=_TRAINING)
_INDEXED_COUNT = Rule(True, 1, stages=_INDEXING)
RULES = {
    "iteration": Rule(True, 0),
    "trainer.n_gpus_per_node": _COUNT,
    "trainer.nnodes": _COUNT,
    "trainer.total_training_steps": _TRAINED_COUNT,
    "data.train_batch_size": _TRAINED_COUNT,
    "data.max_prompt_length": _COUNT,
    "data.max_response_length": _COUNT,
    "actor_rollout_ref.rollout.n": _TRAINED_COUNT,
    "actor_rollout_ref.rollout.temperature": _TRAINED_POSITIVE,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _TRAINED_COUNT,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _SHARE,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": _COUNT,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _TRAINED_COUNT,
    "actor_rollout_ref.actor.ppo_epochs": _TRAINED_COUNT,
    "actor_rollout_ref.actor.optim.lr": _TRAINED_POSITIVE,
    "rollout.max_tokens_per_turn": _COUNT,
    "retrieval.topk": Rule(True, 1, MAX_TOPK),
    "retrieval.response_limit": _COUNT,
    "retrieval.deadline_s": _POSITIVE,
    "retrieval.encoders": _COUNT,
    "retrieval.threads": _COUNT,
    "retrieval.max_batch": _COUNT,
    "retrieval.max_queue": _COUNT,
    "retrieval.window_ms": Rule(False, 0),
    "retrieval.cache_mb": Rule(True, 0),
    "retrieval.restarts": Rule(True, 0),
    "retrieval.startup_budget_s": _POSITIVE,
    "indexing.chunk_tokens": _INDEXED_COUNT,
    "indexing.chunk_overlap": Rule(True, 0, stages=_INDEXING),
    "indexing.workers": _INDEXED_COUNT,
    # With one attempt no question is solved sometimes but not always: no reward would ever differ.
    "solver.attempts": Rule(True, 2),
    "solver.temperature": Rule(False, 0),
    "solver.max_turns": _COUNT,
    "solver.max_tokens_per_turn": _COUNT,
    "solver.max_context_tokens": _COUNT,
    "solver.tp_size": _COUNT,
    "solver.dp_size": _COUNT,
    "solver.mem_fraction_static": _SHARE,
    "solver.concurrency": _COUNT,
    "solver.max_batch_size": _COUNT,
    "run.max_failed_share": Rule(False, 0, 1),
    "run.min_free_gb": Rule(False, 0),
}


def can_be_reckoned_with(subject: Subject) -> bool:
    """Whether every number is one: Python multiplies text as well, into gigabytes of it."""
    return all(rule.is_number(OmegaConf.select(subject.config, key)) for key, rule in _rules(subject))


def _rules(subject: Subject) -> list[tuple[str, Rule]]:
    return [(key, rule) for key, rule in RULES.items() if not rule.stages or subject.stage in rule.stages]


def check_values(subject: Subject) -> Iterator[Finding]:
    """Every value in the table above must be of its kind and in its range."""
    for key, rule in _rules(subject):
        value = OmegaConf.select(subject.config, key)
        if fault := rule.fault(value):
            yield error(key, value, fault, f"set it to a {'whole ' if rule.whole else ''}number {rule}")
    if subject.stage in _INDEXING and can_be_reckoned_with(subject):
        yield from _check_chunks(subject)
    yield from _check_files(subject)
    mode = subject.config.data.get("truncation")
    if mode not in ("error", "left", "right", "middle"):
        yield error("data.truncation", mode, f"is {mode!r}, which veRL does not know", "set it to error")


def _check_files(subject: Subject) -> Iterator[Finding]:
    """veRL would read several files as one; our checks and manifests know the one they were given."""
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(subject.config, key)
        if OmegaConf.is_list(value):
            yield error(
                key, list(value), "is a list, and one parquet file is read", "write them into one file first"
            )


def _check_chunks(subject: Subject) -> Iterator[Finding]:
    """A chunk must have room for what it repeats."""
    from search.chunking import Chunking, ChunkingError

    indexing = subject.config.indexing
    try:
        Chunking(indexing.chunk_tokens, indexing.chunk_overlap)
    except ChunkingError as refused:
        yield error("indexing.chunk_overlap", indexing.chunk_overlap, str(refused), "change one of the two")
