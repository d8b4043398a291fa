"""Cancels work if its ASGI client leaves: `answer = await unless_gone(request.receive, work())`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_gone(receive: Callable[[], Awaitable[Mapping[str, Any]]], work: Awaitable[T]) -> T | None:
    """Return the work's result, or None if the client disconnects. Read the request's body first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        left.cancel()
