"""The solver as an agent. An attempt without an answer is wrong, one that a failing service ends is not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.clients.search_agent import Conversation, Heard, SearchAgent
from verl_ext.method.prompts import Message, PromptForm, solver_messages
from verl_ext.method.solver_reward import solver_answer


@dataclass(frozen=True)
class SolverAttempt(Conversation):
    """One attempt at a question."""

    answer: str | None  # None if the attempt gives no answer or is unfinished


@dataclass(eq=False, kw_only=True)
class SolverAgent(SearchAgent):
    """Runs attempts at questions."""

    prompt_form: PromptForm = "full"

    async def attempts(self, question: str, n: int, seed: int | None = None) -> list[SolverAttempt]:
        """Run n independent attempts concurrently. Attempt i samples with `seed + i`."""
        seeds = [None if seed is None else seed + index for index in range(n)]
        return list(await asyncio.gather(*(self.attempt(question, each) for each in seeds)))

    async def attempt(
        self, question: str, seed: int | None = None, heard: Heard | None = None
    ) -> SolverAttempt:
        """Run one attempt. Raises SolverServerError if the server refuses the request."""
        return await self.answer(solver_messages(question, self.prompt_form, self.max_turns), seed, heard)

    async def answer(
        self, messages: Sequence[Message], seed: int | None = None, heard: Heard | None = None
    ) -> SolverAttempt:
        """Run an attempt that begins with these messages. Raises like `attempt`."""
        conversation = await self.converse(messages, seed, heard)
        answer = solver_answer(conversation.trajectory) if conversation.finished else None
        return SolverAttempt(**vars(conversation), answer=answer)
