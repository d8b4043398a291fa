"""Calls of an environment's own code: bounded in time, and whatever they raise as one line.

    messages = await guarded("sums: Episode.messages", episode.messages, timeout_s=30)

A plain function runs in a thread of its own: one that never returns costs that thread, and neither the event
loop nor the end of the process waits for it.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from drzero.ops.errors import UserError


class EnvironmentFault(Exception):
    """An episode that an environment's own code has spoiled; the message is one line for its cause."""


class EnvironmentUnusable(UserError):
    """An environment that cannot be found, loaded or played; the message says which, why, and what to do."""


def one_line(error: BaseException) -> str:
    """An exception as one line: its class, its message, and where in the environment's code it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return text[:300] + place


async def guarded(what: str, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """The result of an environment's function; raises EnvironmentFault with `what`, if it raises or hangs."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            result = await _in_thread(function, *arguments)
            return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:  # the rollout was cancelled, which is not the environment's doing
        raise
    # Whatever an environment raises, its rollout is spoiled and the run goes on.
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise EnvironmentFault(f"{what} did not return within {timeout_s:g} s") from error
        raise EnvironmentFault(f"{what} raised {one_line(error)}") from error


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from a daemon thread: an executor's threads would be waited for at the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # given up meanwhile
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        # sys.exit in an environment as well: it must not end the thread without a word.
        except BaseException as raised:
            # A future takes no StopIteration, and a thread's exit is not the process's.
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await done
