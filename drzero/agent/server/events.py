"""Server-sent events of work in progress, as `work` tells them: `EventStream(work, failed)`.

Until the first event an error of the work is the request's own, with its status. After it, `failed` gives
the stream's last events. If the client leaves, the work is cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drzero.ops.disconnect import unless_gone

KEEP_ALIVE_S = 15.0  # Proxies cut a silent connection after 30 s or more

Tell = Callable[[str], None]


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
        told = asyncio.Queue[str | None]()
        working = asyncio.ensure_future(self._work(told.put_nowait))
        working.add_done_callback(lambda _: told.put_nowait(None))
        has_begun = False
        try:
            while (event := await _next(told)) is not None:
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
        finally:
            working.cancel()


async def _next(told: "asyncio.Queue[str | None]") -> str | None:
    try:
        return await asyncio.wait_for(told.get(), KEEP_ALIVE_S)
    except TimeoutError:
        return ": still at it\n\n"
