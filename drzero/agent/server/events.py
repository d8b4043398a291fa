"""Server-sent events of work in progress, as `work` tells them: `EventStream(work, failed)`.

Until the first event an error of the work is the request's own, with its status. After it, `failed` gives
the stream's last events. If the client leaves, the work is cancelled.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drzero.ops.disconnect import unless_gone

KEEP_ALIVE_S = 15.0  # Proxies cut a silent connection after 30 s or more

Tell = Callable[[str], None]
T = TypeVar("T")


@asynccontextmanager
async def at_work(
    work: Callable[[Tell], Awaitable[T]], silence: str
) -> AsyncIterator[tuple[AsyncIterator[str], Awaitable[T]]]:
    """The work's messages until it ends, `silence` whenever none came for a while, and then its result."""
    told = asyncio.Queue[str | None]()
    working = asyncio.ensure_future(work(told.put_nowait))
    working.add_done_callback(lambda _: told.put_nowait(None))
    try:
        yield _messages(told, silence), working
    finally:
        working.cancel()


async def _messages(told: "asyncio.Queue[str | None]", silence: str) -> AsyncIterator[str]:
    while True:
        try:
            message = await asyncio.wait_for(told.get(), KEEP_ALIVE_S)
        except TimeoutError:
            message = silence
        if message is None:
            return
        yield message


class EventStream(Response):
    """A stream of events, with a comment whenever there was none for a while."""

    media_type = "text/event-stream"

    def __init__(self, work: Callable[[Tell], Awaitable[None]], failed: Callable[[Exception], str]) -> None:
        # nginx would hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work, self._failed = work, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the work or the client ends."""
        await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        has_begun = False
        async with at_work(self._work, ": still at it\n\n") as (events, working):
            async for event in events:
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    has_begun = True
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            try:
                await working
                last = ""
            except Exception as error:  # Whatever failed, its client must hear of it.
                if not has_begun:
                    raise
                last = self._failed(error)
            await send({"type": "http.response.body", "body": last.encode()})
