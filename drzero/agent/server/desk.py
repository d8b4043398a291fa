"""Admits clients' questions: at most so many at once, each with its deadline, none for a client that left.

Whoever cancels the task frees the question's place, its search, and its place in the model's batch.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drzero.agent.answer import Answer
from drzero.agent.earlier import Exchange
from drzero.agent.running import Agents, Asker, Progress
from drzero.recipe.compose import retrieval_url
from search.client import SearchClient
from verl_ext.clients.chat_endpoint import Reply
from verl_ext.method.prompts import Message

RETRY_AFTER_S = 2  # A question takes a few seconds


class Busy(Exception):
    """As many questions are being answered as may be at once."""


class Figures:
    """The service's counters, for Prometheus."""

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        self.answers = Counter("agent_answers", "Questions that ended, by state", ["state"], registry=into)
        self.busy = Counter("agent_refused", "Questions refused: too many were running", registry=into)
        self.left = Counter("agent_left", "Questions whose client left before the answer", registry=into)
        self.running = Gauge("agent_running", "Questions being answered now", registry=into)
        self.seconds = Histogram("agent_seconds", "Seconds an answer took", registry=into)


@asynccontextmanager
async def opened_desk(agents: Agents) -> AsyncIterator[tuple["Desk", SearchClient]]:
    """The desk of running agents for the running event loop, and a client of their search service."""
    config = agents.sides[0][0]
    search = SearchClient(retrieval_url(config.retrieval))
    async with agents.opened() as askers:
        try:
            yield Desk(askers, agents.index, places=config.solver.concurrency), search
        finally:
            await search.aclose()


@dataclass(eq=False)
class Desk:
    """The agent in a running event loop, for any number of clients."""

    askers: Sequence[Asker]  # the agent, and the one to compare with if there is one
    index: str  # its fingerprint
    places: int  # questions at once
    figures: Figures = field(default_factory=Figures)
    _running: int = 0

    @property
    def names(self) -> list[str]:
        """The sides' names in requests."""
        return [asker.name for asker in self.askers]

    async def ask(
        self,
        question: str,
        earlier: Sequence[Exchange] = (),
        progress: Progress | None = None,
        *,
        side: int = 0,
    ) -> Answer:
        """Answer one question. Raises Busy, or as `Asker.ask`."""
        with self._place(), self.figures.seconds.time():
            answer = await self.askers[side].ask(question, earlier, progress)
            self.figures.answers.labels(answer.state).inc()
            return answer

    async def say(
        self, messages: Sequence[Message], most: int | None = None, *, side: int = 0
    ) -> Reply | None:
        """One reply of at most so many tokens without a search. Raises Busy, or as `SearchAgent.say`."""
        with self._place():
            return await self.askers[side].solver.say(messages, most)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._running >= self.places:
            self.figures.busy.inc()
            raise Busy(f"{self.places} questions are being answered: ask again in a moment")
        self._running += 1
        self.figures.running.inc()
        try:
            yield
        except asyncio.CancelledError:
            self.figures.left.inc()
            raise
        finally:
            self._running -= 1
            self.figures.running.dec()
