"""One agent of an episode at its model: what it is asked and samples, within the limits of a rollout."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.episodes import Ended, EpisodeLimits, Model, Sampled


class TurnRefused(Exception):
    """A request that the model does not answer; the message is for the library, which passes it on."""


@dataclass
class Clock:
    """How long an episode has been without a question to the model: the time its environment has had."""

    waiting: int = 0
    """Questions that are being answered."""
    since: float = field(default_factory=time.monotonic)

    def idle_s(self) -> float:
        """Seconds since the last answer; 0 while one is awaited."""
        return 0.0 if self.waiting else time.monotonic() - self.since


@dataclass
class Asked:
    """One answered question."""

    prompt_ids: list[int]
    sampled: Sampled

    @property
    def known(self) -> list[int]:
        """All ids, those sampled included."""
        return self.prompt_ids + self.sampled.ids


@dataclass
class Session:
    """What one agent of the library has asked so far."""

    model: Model
    limits: EpisodeLimits
    clock: Clock
    asked: list[Asked] = field(default_factory=list)
    ended: Ended = "over"
    """`tokens` once no room was left for a turn."""
    too_long: str | None = None
    """Why the conversation could not begin."""
    failure: Exception | None = None
    """What the model's engine or server raised."""
    _starts: list[tuple[int, list[int]]] = field(default_factory=list)

    async def sample(self, prompt_ids: Sequence[int]) -> Sampled:
        """The next turn after these ids; raises TurnRefused."""
        ids = list(prompt_ids)
        start = self._start(ids)
        room = min(self.limits.tokens_per_turn, self.limits.response_tokens - (len(ids) - start))
        if room <= 0:
            self.ended = "tokens"
            raise TurnRefused(f"maximum context length: no room is left after {len(ids)} tokens")
        self.clock.waiting += 1
        try:
            sampled = await self.model.sample(ids, room)
        # Any error of an engine or server: the player raises it, once the library has ended the episode.
        except Exception as error:
            self.failure = error
            raise TurnRefused(f"the model failed: {type(error).__name__}") from error
        finally:
            self.clock.waiting -= 1
            self.clock.since = time.monotonic()
        self.asked.append(Asked(ids, sampled))
        self._starts.append((start, self.asked[-1].known))
        return sampled

    def _start(self, ids: list[int]) -> int:
        """Where the conversation's prompt ends, a new one's as well; raises TurnRefused for one too long."""
        for start, known in reversed(self._starts):
            if ids[: len(known)] == known:
                return start
        if len(ids) > self.limits.prompt_tokens:
            self.too_long = (
                f"the first messages are {len(ids)} tokens, more than "
                f"data.max_prompt_length={self.limits.prompt_tokens}"
            )
            raise TurnRefused(f"maximum context length: {self.too_long}")
        return len(ids)


def generate_response(sampled: Sampled) -> dict[str, Any]:
    """An answer to `POST /inference/v1/generate`; a log-prob that the engine does not give is 0."""
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
