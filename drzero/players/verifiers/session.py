"""One agent of an episode and its model: the agent's requests and samples, within a rollout's limits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.openai_http import RequestRefused
from verl_ext.episodes import Answered, Ended, EpisodeLimits, Model, Sampled


@dataclass
class Clock:
    """Time since the episode last asked the model, which its environment has spent."""

    waiting: int = 0  # requests in progress
    since: float = field(default_factory=time.monotonic)

    def idle_s(self) -> float:
        """Seconds since the last answer, or 0 while one is awaited."""
        return 0.0 if self.waiting else time.monotonic() - self.since


@dataclass
class Session:
    """Everything that one agent of the library has asked."""

    model: Model
    limits: EpisodeLimits
    clock: Clock
    asked: list[Answered] = field(default_factory=list)
    ended: Ended = "over"  # `tokens` if no room was left for a turn
    too_long: str | None = None  # why the conversation could not begin
    failure: Exception | None = None  # the error of the model's engine or server
    _starts: list[tuple[int, list[int]]] = field(default_factory=list)

    async def sample(self, prompt_ids: Sequence[int]) -> Sampled:
        """Sample the turn after these ids. Raises RequestRefused."""
        ids = list(prompt_ids)
        start = self._start(ids)
        room = min(self.limits.tokens_per_turn, self.limits.response_tokens - (len(ids) - start))
        if room <= 0:
            self.ended = "tokens"
            raise RequestRefused(f"maximum context length: no room is left after {len(ids)} tokens")
        self.clock.waiting += 1
        try:
            sampled = await self.model.sample(ids, room)
        # Any error of an engine or server. The player raises it after the library has ended the episode.
        except Exception as error:
            self.failure = error
            raise RequestRefused(f"the model failed: {type(error).__name__}") from error
        finally:
            self.clock.waiting -= 1
            self.clock.since = time.monotonic()
        self.asked.append(Answered(ids, sampled))
        self._starts.append((start, self.asked[-1].known))
        return sampled

    def _start(self, ids: list[int]) -> int:
        """The length of the prompt. Raises RequestRefused if it is too long."""
        for start, known in reversed(self._starts):
            if ids[: len(known)] == known:
                return start
        if len(ids) > self.limits.prompt_tokens:
            self.too_long = (
                f"the first messages are {len(ids)} tokens, more than "
                f"data.max_prompt_length={self.limits.prompt_tokens}"
            )
            raise RequestRefused(f"maximum context length: {self.too_long}")
        return len(ids)


def generate_response(sampled: Sampled) -> dict[str, Any]:
    """An answer to `POST /inference/v1/generate`. Unknown log-probs are 0."""
    log_probs = sampled.log_probs if sampled.log_probs is not None else [0.0] * len(sampled.ids)
    content = [
        {"token": f"token_id:{token}", "logprob": log_prob}
        for token, log_prob in zip(sampled.ids, log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": sampled.ids,
        "logprobs": {"content": content},
        "finish_reason": "length" if sampled.truncated else "stop",
    }
    return {"request_id": "", "choices": [choice]}
