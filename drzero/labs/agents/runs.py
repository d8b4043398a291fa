"""Run an agent on items, in turn or all at once. A failed run is counted, never scored.

bench = await play(agent, items, plan, recorder)
bench.runs[17].failure                    # None, or its cause with the agent's line
"""

import asyncio
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drzero.labs.agents.event_loop import LoopWatch, Pause
from drzero.labs.agents.leaks import Connection, connections, settled, tasks_left
from drzero.labs.agents.proxy import CallTotals, ModelCall, Recorder
from environments.agent.contract import Agent, Endpoint, RewardRule

NO_KEY = "None"  # for a missing key, because OpenAI's client requires one


@dataclass
class Failure:
    """Why a run has no reward."""

    cause: str  # the exception's class and message, or the reward's fault
    place: str = ""  # the agent's line
    trace: str = ""


@dataclass
class AgentRun:
    """One run of the agent."""

    number: int
    item: int | None  # Its number in the data. None for a veRL rollout, whose row has it.
    data: Any
    seconds: float = 0.0
    returned: Any = None
    failure: Failure | None = None
    calls: list[ModelCall] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How to run an agent."""

    group_size: int = 1  # runs an item
    at_once: bool = False
    deadline_s: float = 300.0
    reward: RewardRule = field(default_factory=RewardRule)
    api_key: str = NO_KEY
    model: str = ""
    search_url: str | None = None


@dataclass
class Bench:
    """The runs and the watches' findings."""

    runs: list[AgentRun]
    seconds: float
    totals: CallTotals
    most_at_once: int
    pause: Pause
    latest_s: float  # how late the event loop was at worst
    left_open: Mapping[tuple[str, int], Sequence[Connection]] = field(default_factory=dict)
    tasks_left: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[AgentRun]:
        """The runs without a reward."""
        return [run for run in self.runs if run.failure is not None]


async def play(agent: Agent, items: Sequence[Any], plan: Plan, recorder: Recorder) -> Bench:
    """Run the agent on every item. An exception fails its run alone."""
    open_before, tasks_before = connections(), asyncio.all_tasks()
    runs = [
        AgentRun(number, number // plan.group_size, items[number // plan.group_size])
        for number in range(len(items) * plan.group_size)
    ]
    player = _Player(agent, plan, recorder)
    began = time.perf_counter()
    with LoopWatch(asyncio.get_running_loop(), agent.file and agent.file.parent) as watch:
        if plan.at_once:
            await asyncio.gather(*map(player.play, runs))
        else:
            for run in runs:
                await player.play(run)
        seconds = time.perf_counter() - began
        await asyncio.to_thread(recorder.release)
        left = await settled(open_before)
    tasks = tasks_left(tasks_before)
    return Bench(
        runs, seconds, recorder.totals, player.most_at_once, watch.worst, watch.latest_s, left, tasks
    )


class _Player:
    def __init__(self, agent: Agent, plan: Plan, recorder: Recorder) -> None:
        self._agent, self._plan, self._recorder = agent, plan, recorder
        self._running = 0
        self.most_at_once = 0

    async def play(self, run: AgentRun) -> None:
        began = time.perf_counter()
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        limit = asyncio.timeout(self._plan.deadline_s)
        try:
            async with limit:
                plan, url = self._plan, self._recorder.url(run.number)
                endpoint = Endpoint(url, plan.api_key, plan.model, plan.search_url)
                run.returned = await self._agent.play(run.data, endpoint)
            if fault := self._plan.reward.fault(run.returned):
                run.failure = Failure(fault)
        # The bench is to find whatever an agent raises, sys.exit and its own cancellation included.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            late = isinstance(error, TimeoutError) and limit.expired()
            run.failure = self._failure(error, late)
        finally:
            self._running -= 1
            run.seconds = time.perf_counter() - began
            run.calls = self._recorder.take(run.number)
            if run.failure is None:
                for call in run.calls:  # or hundreds of conversations stay in memory
                    call.forget()

    def _failure(self, error: BaseException, late: bool) -> Failure:
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        cause = " ".join(f"{type(first).__name__}: {first}".split())[:300].removesuffix(":")
        if late:
            cause = f"did not end within {self._plan.deadline_s:g} s"
        try:
            trace = "".join(traceback.format_exception(error))
        except RecursionError:
            trace = repr(error)[:1000]
        return Failure(self._redacted(cause), self._place(first), self._redacted(trace))

    def _place(self, error: BaseException) -> str:
        own = self._agent.file and self._agent.file.parent
        frames = traceback.extract_tb(error.__traceback__)
        in_own = [
            one
            for one in frames
            if own and Path(one.filename).is_relative_to(own) and "site-packages" not in one.filename
        ]
        return f"{Path(in_own[-1].filename).name}:{in_own[-1].lineno}" if in_own else ""

    def _redacted(self, text: str) -> str:
        key = self._plan.api_key
        return text if key == NO_KEY else text.replace(key, "***")
