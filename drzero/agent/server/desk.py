"""Admits clients' questions: at most so many at once, each with its deadline, none for a client that left.

    answer = await desk.ask("Who founded Orrin?", progress=tell)     # raises Busy, or what the agent raises

Whoever cancels the task frees the question's place, its search, and its place in the model's batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drzero.agent.answer import Answer
from drzero.agent.earlier import Exchange
from drzero.agent.running import Asker, Progress

RETRY_AFTER_S = 2  # A question takes a few seconds


class Busy(Exception):
    """As many questions are being answered as may be at once."""


class Figures:
    """What the service counts, for Prometheus."""

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        self.answers = Counter("agent_answers", "Questions that ended, by state", ["state"], registry=into)
        self.busy = Counter("agent_refused", "Questions refused: too many were running", registry=into)
        self.left = Counter("agent_left", "Questions whose client left before the answer", registry=into)
        self.running = Gauge("agent_running", "Questions being answered now", registry=into)
        self.seconds = Histogram("agent_seconds", "Seconds an answer took", registry=into)


@dataclass(eq=False)
class Desk:
    """The agent in a running event loop, for any number of clients."""

    askers: Sequence[Asker]  # the agent, and the one to compare with if there is one
    name: str  # the agent's, in requests
    index: str  # the fingerprint of what is searched
    places: int  # questions at once
    figures: Figures = field(default_factory=Figures)
    _running: int = 0

    async def ask(
        self,
        question: str,
        earlier: Sequence[Exchange] = (),
        progress: Progress | None = None,
        *,
        side: int = 0,
    ) -> Answer:
        """Answer one question. Raises Busy, or as `Asker.ask`."""
        if self._running >= self.places:
            self.figures.busy.inc()
            raise Busy(f"{self.places} questions are being answered: ask again in a moment")
        self._running += 1
        self.figures.running.inc()
        answer = None
        try:
            with self.figures.seconds.time():
                answer = await self.askers[side].ask(question, earlier, progress)
            return answer
        finally:
            self._running -= 1
            self.figures.running.dec()
            if answer is None:
                self.figures.left.inc()
            else:
                self.figures.answers.labels(answer.state).inc()
