"""Plays episodes of an environment with a served model, with the code that training uses."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from environments.row import Row
from environments.taskset import Taskset
from verl_ext.clients.served_model import ServedModel, ServerUnavailable
from verl_ext.episodes import EpisodeLimits, Played, Sampled, play_row


@dataclass(frozen=True)
class EpisodeAttempt:
    """One episode. Unfinished if the server failed, the deadline passed, or the environment had a fault."""

    played: Played | None  # None if the server failed or the deadline passed
    failure: str | None
    latency_s: float  # without the wait for a free slot

    @property
    def finished(self) -> bool:
        """Whether the episode has a score."""
        return self.failure is None


@dataclass(eq=False, kw_only=True)
class EnvironmentAgent(ServedModel):
    """Plays episodes of one environment."""

    taskset: Taskset
    limits: EpisodeLimits

    async def attempt(self, row: Row) -> EpisodeAttempt:
        """Play one row. Raises SolverServerError if the server refuses the request."""
        async with self._slots:
            started, played = time.monotonic(), None
            try:
                async with asyncio.timeout(self.deadline_s):
                    played = of_episode(await play_row(self.taskset, row, self, self.limits))
                failure = played.fault
            except TimeoutError:
                failure = f"the episode did not end within {self.deadline_s:g} s"
            except ServerUnavailable as error:
                failure = f"the solver server at {self.completions_url} failed: {error}"
        return EpisodeAttempt(played, failure, time.monotonic() - started)

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """Sample the next turn."""
        return await self.complete(prompt_ids, max_tokens)


def of_episode(rows: Sequence[Played]) -> Played:
    """An episode's last row, with the tokens of all, and all of them as `rows` among its extra fields."""
    last = rows[-1]
    tokens = {name: sum(getattr(row, name) for row in rows) for name in ("tokens_in", "tokens_out")}
    return replace(last, **tokens, extra={**last.extra, "rows": rows})


def fitting(limits: EpisodeLimits, max_context_tokens: int) -> EpisodeLimits:
    """The limits, with a response short enough for the server's context."""
    room = max_context_tokens - limits.prompt_tokens
    return replace(limits, response_tokens=max(1, min(limits.response_tokens, room)))
