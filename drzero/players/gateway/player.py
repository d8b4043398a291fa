"""Plays a row with an agent of your own, in its own thread. Its calls become the rows to train on.

An agent that raises, hangs, asks nothing, or gives no reward leaves no score. Its episode begins again up to
`Taskset.tries` times, and a row without a score is counted and trains nothing.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from drzero.ops.telemetry import waiting
from drzero.players.gateway.rows import call_tree, played_rows
from drzero.players.gateway.server import Gateway
from drzero.players.gateway.session import AgentSession
from environments.agent.contract import Agent, Endpoint
from environments.agent.taskset import AgentTaskset
from environments.conversation import Conversation
from environments.fault import one_line
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.episodes import EpisodeLimits, Model, Played

FAULTS: dict[str, str | tuple[str, ...]] = {
    "raised": "it raised",
    "timed_out": "it did not end",
    "no_call": "it called its model not once",
    "too_many_calls": "it called the model more than",
    "another_key": ("its model was called with the key of another", "it called the model of another"),
    "too_long": "its first messages are",
    "no_reward": ("the reward", "a reward's name", "it returned", "the weights name"),
}
"""What goes wrong with an agent by name, and how its sentence begins."""
_TO_STOP_S = 3.0  # for a cancelled agent. One that takes longer is left behind, without a model


async def play(taskset: Taskset, row: Row, model: Model, limits: EpisodeLimits) -> list[Played]:
    """Play one episode. Returns a row for each conversation that no other one extends."""
    assert isinstance(taskset, AgentTaskset)
    faults: list[dict[str, str]] = []
    while True:
        rows, fault = await _episode(taskset, row, model, limits)
        if fault is None:
            break
        faults.append({"name": fault_name(fault), "text": fault})
        if len(faults) >= taskset.tries:
            break
    for played in rows:
        played.extra["agent"]["faults"] = faults
        if fault is not None:
            played.fault, played.ended = f"{taskset.name}: {fault} [row {row.id}]", "fault"
    return rows


def fault_name(fault: str) -> str:
    """A fault's name in FAULTS, or `other`."""
    return next((name for name, words in FAULTS.items() if fault.startswith(words)), "other")


async def _episode(
    taskset: AgentTaskset, row: Row, model: Model, limits: EpisodeLimits
) -> tuple[list[Played], str | None]:
    most = min(taskset.max_turns, limits.max_turns or taskset.max_turns)
    session = AgentSession(model, limits, most)
    server = await Gateway.running()
    endpoint = replace(server.open(session), search_url=taskset.search_url)
    try:
        with waiting("environment", taskset.timeout_s):
            returned, fault = await _returned(taskset.agent, row.data["task"], endpoint, taskset.timeout_s)
    finally:
        server.close(endpoint)
    if session.failure is not None:
        raise session.failure
    rows = played_rows(session)
    fault, score = session.fault or fault, None
    if fault is None and not rows:
        fault = "it called its model not once"
    if fault is None:
        scored = taskset.scored(returned, len(session.calls))
        score, fault = (None, scored) if isinstance(scored, str) else (scored, None)
    agent: dict[str, Any] = {"calls": call_tree(session, rows)}
    if taskset.weights:
        agent["weights"] = taskset.weights
    if score is not None and isinstance(returned, Sequence):
        agent["rewards"] = [float(reward) for reward in returned]
    rows = rows or [Played([], [], [], None, Conversation(), None, extra={"agent": {"places": {}}})]
    for played in rows:
        played.score = score
        played.extra["agent"] |= agent
    return rows, fault


async def _returned(agent: Agent, task: Any, endpoint: Endpoint, limit_s: float) -> tuple[Any, str | None]:
    """The agent's rewards, and its fault."""
    thread = _Thread(lambda: agent.play(task, endpoint))
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await thread.result(), None
    except asyncio.CancelledError:
        await thread.stop()
        raise
    # An agent may raise anything, sys.exit included. Its episode fails and the run continues.
    except BaseException as error:
        if not limit.expired():
            return None, f"it raised {one_line(error)}"
    stopped = await thread.stop()
    return None, f"it did not end within {limit_s:g} s{'' if stopped else ', nor when it was cancelled'}"


class _Thread:
    """A daemon thread with an event loop: a blocking client holds up its own episode only."""

    def __init__(self, play: Callable[[], Awaitable[Any]]) -> None:
        self._play, self._here = play, asyncio.get_running_loop()
        self._result: asyncio.Future[Any] = self._here.create_future()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    async def result(self) -> Any:
        return await asyncio.shield(self._result)

    async def stop(self) -> bool:
        """Cancel it. False if it does not end."""
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.wait({self._result}, timeout=_TO_STOP_S)
        if self._result.done():
            self._result.exception()  # heard, or asyncio would report it
        return self._result.done()

    def _run(self) -> None:
        settle: Callable[[Any], None] = self._result.set_result
        try:
            outcome = asyncio.run(self._main())
        # Also SystemExit and the cancellation, which would end the thread silently.
        except BaseException as raised:
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
            settle, outcome = self._result.set_exception, error.with_traceback(raised.__traceback__)
        with suppress(RuntimeError):  # it was left behind, and the loop that waited for it has ended
            self._here.call_soon_threadsafe(settle, outcome)

    async def _main(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._play()
