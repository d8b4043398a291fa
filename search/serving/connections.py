"""Time limits of a connection: on the head of a request, and on a client that does not read its answer.

    uvicorn.Config(app, http=Connection)

uvicorn (0.54) has a limit for an idle connection that has had an answer, and no other: a client that sends
nothing, or half a head, keeps its connection for ever, and so does one that does not read, with the rest of
its answer. A body's time is the app's own limit.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 30.0
"""From the connection, or the first byte of a further head, to the end of the head."""
WRITE_S = 30.0
"""For the client to take what is in the buffer, which the app fills `PIECE` by `PIECE`."""
PIECE = 256 << 10


class Connection(HttpToolsProtocol):
    """uvicorn's protocol; what it overrides are asyncio's callbacks and those of the parser."""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Expect the end of the head, unless these bytes hold it, or are of a request that is in progress."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Expect no head: it is here."""
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Expect the client to read."""
        super().pause_writing()
        self._write = self._write or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Expect nothing of it: it has read."""
        if self._write is not None:
            self._write.cancel()
            self._write = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        for timer in (self._head, self._write):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if not self.transport.is_closing():
            self._head = self._head or self.loop.call_later(HEAD_S, self.transport.abort)
