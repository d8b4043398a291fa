"""Time limits of a connection: for a request's head, and for a client that does not read its answer.

    uvicorn.Config(app, http=Connection)

uvicorn (0.54) limits only idle connections that have had an answer.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 30.0  # From the connection, or a further head's first byte, to the head's end
WRITE_S = 30.0  # For the client to take the buffer, which the app fills `PIECE` by `PIECE`
PIECE = 256 << 10


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with timers in asyncio's and the parser's callbacks."""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Expect the rest of a head, unless these bytes end it or belong to a request in progress."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The head has arrived."""
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Expect the client to read."""
        super().pause_writing()
        self._write = self._write or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        if self._write is not None:
            self._write.cancel()
            self._write = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._head, self._write):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if not self.transport.is_closing():
            self._head = self._head or self.loop.call_later(HEAD_S, self.transport.abort)
