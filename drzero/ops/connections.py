"""Limits of a connection: the time and length of a request's head, and the time to read an answer.

uvicorn (0.54) limits only idle connections that have had an answer.
"""

import asyncio
import os
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10  # The longest head, and the longest trailers of a chunked body
LINGER_S = 2.0  # For a client with too long a head to read its answer
HEAD_S = 30.0  # From the connection, or a further head's first byte, to the head's end
WRITE_S = 30.0  # For the client to take the buffer, which the app fills `PIECE` by `PIECE`
PIECE = 256 << 10
_TOO_LONG = f"a request's head may have {HEAD_BYTES} bytes\n".encode()
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
) % (len(_TOO_LONG), _TOO_LONG)


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """A server with these limits. It logs every request only if DRZERO_LOG_LEVEL is DEBUG."""
    level = "debug" if os.environ.get("DRZERO_LOG_LEVEL") == "DEBUG" else "warning"
    return uvicorn.Config(app, log_level=level, http=Connection, ws="none", **options)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with timers in asyncio's and the parser's callbacks."""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None
    _unused = 0  # bytes since a head or a piece of a body was complete
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Expect the rest of a head, unless these bytes end it or belong to a request in progress."""
        while data and not (self._is_refused or self.transport.is_closing()):
            piece, data = data[: HEAD_BYTES - self._unused], data[HEAD_BYTES - self._unused :]
            self._unused += len(piece)
            super().data_received(piece)
            if self._unused >= HEAD_BYTES:
                self._refuse()
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_body(self, body: bytes) -> None:
        """A piece of the body has arrived."""
        self._unused = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head has arrived."""
        self._unused = 0
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

    def _refuse(self) -> None:
        """Answer 431, unless another answer is being sent, and discard the rest."""
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_REFUSAL)
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _expect_head(self) -> None:
        if not self.transport.is_closing():
            self._head = self._head or self.loop.call_later(HEAD_S, self.transport.abort)
