"""`challenger_score` with attempts that can be repeated: each question's have seeds made from its words.

The reward that bench/streamed_reward.py gives veRL. It adds when it began and ended, in Unix seconds.
"""

import time
import zlib
from typing import Any

from verl_ext import rewards
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt


class SeededAgent(SolverAgent):
    """Attempt i at a question has the same seed in every run."""

    async def attempts(self, question: str, n: int, seed: int | None = None) -> list[SolverAttempt]:
        """As SolverAgent, seeded."""
        return await super().attempts(question, n, zlib.crc32(question.encode()))


rewards.SolverAgent = SeededAgent  # type: ignore[misc]


async def challenger_score(*args: Any, **named: Any) -> dict[str, Any]:
    """The product's reward of one trajectory."""
    begun = time.time()
    score = await rewards.challenger_score(*args, **named)
    return score | {"begun": begun, "ended": time.time()}
