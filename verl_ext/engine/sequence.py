"""One request to the engine (`Sequence`) and its result (`Generation`)."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from verl_ext.engine.sampling import SamplingParams, TopLogProbs

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Generation:
    """A finished request: sampled ids with any stop id, and the log-probability of each in nats."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    top_log_probs: list[TopLogProbs] = field(default_factory=list)  # per position, as many as requested


@dataclass(eq=False)
class Sequence:
    """One request. Its cache slot holds the keys and values of all ids but the newest."""

    prompt: np.ndarray
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    draws: random.Random
    stop_when: Callable[[list[int]], bool] | None
    future: Future[Generation] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Number of cached positions after the prefill: all ids but the newest."""
        return len(self.prompt) + len(self.token_ids) - 1

    @property
    def newest(self) -> int:
        """The id that the next forward reads."""
        return self.token_ids[-1] if self.token_ids else int(self.prompt[-1])

    def append(self, token_id: int, log_prob: float, top: TopLogProbs) -> FinishReason | None:
        """Append a sampled id. Returns why the request ends, or None."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.tops.append(top)
        if token_id in self.stop_ids or (self.stop_when is not None and self.stop_when(self.token_ids)):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def cached_ids(self) -> np.ndarray:
        """The cached ids, in order."""
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int64)])[: self.cached]

    def fail(self, failure: Exception) -> None:
        """Raise `failure` in the caller, unless it has cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(failure)

    def resolve(self, reason: FinishReason, weight_version: int) -> None:
        """Pass the result to the caller, unless it has cancelled."""
        if self.future.set_running_or_notify_cancel():
            generation = Generation(self.token_ids, self.log_probs, reason, weight_version, self.tops)
            self.future.set_result(generation)
