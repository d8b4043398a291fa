"""Calls of an environment's own code: limited in time, with any error as one line."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from drzero.ops.errors import UserError
from drzero.ops.text import encodable

SAME_PACKAGES = "DRZERO_SAME_PACKAGES"
"""Set in a container with the packages of the run's own: what it cannot load, the run cannot either."""


class EnvironmentFault(Exception):
    """An environment's own code has failed an episode. The message is one line."""


class EnvironmentUnusable(UserError):
    """An environment cannot be found, loaded or played."""


def one_line(error: BaseException) -> str:
    """An exception as one line: class, message, and the place in the environment's code."""
    if isinstance(error, BaseExceptionGroup):  # whose own text is how many there are
        return one_line(error.exceptions[0])
    text = " ".join(f"{type(error).__name__}: {_text(error)}".split())
    trace = None if isinstance(error, SyntaxError) else error.__traceback__  # its text has the place
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return encodable(text[:300] + place)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    # The class may be the user's own.
    except Exception:
        return "(its text cannot be read)"


async def guarded(what: str, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Call an environment's function. Raises EnvironmentFault with `what` if it raises or hangs."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            result = await _in_thread(function, *arguments)
            return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:  # the rollout was cancelled, which is not the environment's fault
        raise
    # An environment may raise anything. Its rollout fails and the run continues.
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise EnvironmentFault(f"{what} did not return within {timeout_s:g} s") from error
        raise EnvironmentFault(f"{what} raised {one_line(error)}") from error


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run it in a daemon thread, since the process would wait for an executor's threads at its end."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # who waits may leave, and the thread runs on

    def work() -> None:
        try:
            done.set_result(function(*arguments))
        # Also SystemExit, which would end the thread silently.
        except BaseException as raised:
            # A future takes no StopIteration, and SystemExit must not end the process.
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            done.set_exception(raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}"))

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await asyncio.wrap_future(done)
