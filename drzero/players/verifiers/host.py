"""The library's own thread, where its environments, servers and programs run.

A taskset that blocks the loop stops only the episodes in its thread, which is then abandoned.
"""

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from drzero.players.verifiers.session import Clock
from environments.fault import EnvironmentFault, one_line
from environments.row import Row
from environments.verifiers.taskset import VerifiersTaskset

_TO_STOP_S = 3.0  # for a cancelled episode. A thread that takes longer is blocked
_AT_EXIT_S = 12.0  # for the library's cleanups, which wait 5 s after SIGTERM and 5 s after SIGKILL


class Host:
    """One thread with an event loop and one environment of the library."""

    def __init__(self, taskset: VerifiersTaskset, row: Row) -> None:
        self.name, self.blocked_in = taskset.name, ""
        self._build: Callable[[], Any] = lambda: taskset.environment(row)
        # Not uvloop, because its waiting shows in no Python frame.
        self._loop = asyncio.SelectorEventLoop()
        self._ready: Future[Any] = Future()
        self._closing, self._ended = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{taskset.name} host", daemon=True)
        self._thread.start()

    async def ready(self, timeout_s: float) -> None:
        """Wait for the environment and its servers. Raises EnvironmentFault."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._ready))
        except TimeoutError:
            _forget(self)
            message = f"{self.name} did not start within {timeout_s:g} s{self._where()}"
            raise EnvironmentFault(message) from None
        # Third-party code: whatever it raises is the environment's fault.
        except Exception as error:
            _forget(self)
            raise EnvironmentFault(f"{self.name} cannot be started: {one_line(error)}") from error

    async def play(
        self, task: Any, context: Any, clock: Clock, timeout_s: float, on_trace: Callable[[Any], None]
    ) -> Any:
        """Play one episode. Raises EnvironmentFault if its environment is idle longer than `timeout_s`."""
        environment = self._ready.result()
        episode = environment.run_episode(task, context, on_trace=on_trace)
        future = asyncio.run_coroutine_threadsafe(episode, self._loop)
        ended = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({ended}, timeout=min(0.5, timeout_s / 4)))[0]:
                if self.blocked_in:
                    raise EnvironmentFault(f"{self.name} is blocked by another episode{self.blocked_in}")
                if clock.idle_s() > timeout_s:
                    raise EnvironmentFault(f"{self.name} did nothing for {timeout_s:g} s{self._where()}")
            return ended.result()
        finally:
            if not ended.done():
                await self._stop(ended)

    async def _stop(self, ended: "asyncio.Future[Any]") -> None:
        ended.cancel()
        alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            async with asyncio.timeout(_TO_STOP_S):
                await asyncio.wrap_future(alive)
        except TimeoutError:
            self.blocked_in = self._where() or " "
            _forget(self)

    def close(self) -> None:
        """End the environment's servers, waiting briefly."""
        if self._thread.is_alive() and not self.blocked_in:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._ended.wait(_AT_EXIT_S + _TO_STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        # Raised in `ready`. Later, nobody waits for it.
        except BaseException as error:
            if not self._ready.done():
                delivered = error if isinstance(error, Exception) else RuntimeError(repr(error))
                self._ready.set_exception(delivered)
        ended = self._loop.run_until_complete(_others_ended())
        self._ended.set()
        if ended:
            self._loop.close()
            return
        # Destroyed unfinished, a shielded cleanup loops forever. Without an end, the thread keeps it alive.
        threading.Event().wait()

    async def _serve(self) -> None:
        environment = self._build()
        async with environment.serving():
            self._ready.set_result(environment)
            await self._closing.wait()

    def _where(self) -> str:
        """The code that the thread is in, or "" if it waits for events."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None or frame.f_code.co_filename.endswith("selectors.py"):
            return ""
        return f" (in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno})"


async def _others_ended() -> bool:
    """They are mostly cleanups of cancelled episodes."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for patience_s in (_AT_EXIT_S, _TO_STOP_S):
        if not others:
            break
        _, others = await asyncio.wait(others, timeout=patience_s)
        for task in others:
            task.cancel()
    return not others


_HOSTS: dict[tuple[VerifiersTaskset, str], Host] = {}


async def host_of(taskset: VerifiersTaskset, row: Row) -> Host:
    """The process's host for rows of this split, ready to play. Raises EnvironmentFault."""
    key = (taskset, row.data["split"])
    if key not in _HOSTS:
        _HOSTS[key] = Host(taskset, row)
    host = _HOSTS[key]
    await host.ready(taskset.timeout_s)
    return host


def _forget(host: Host) -> None:
    for key in [key for key, known in _HOSTS.items() if known is host]:
        del _HOSTS[key]


@atexit.register
def _close_all() -> None:
    for host in list(_HOSTS.values()):
        host.close()
