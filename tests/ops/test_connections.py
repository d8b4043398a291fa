"""Servers that bound what a client sends before its request is complete."""

import asyncio
from typing import Any

import pytest
import uvicorn

from drzero.ops.connections import HEAD_BYTES, Connection

POST = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(body)})


def asked(*pieces: bytes) -> bytes:
    async def talk() -> bytes:
        server = uvicorn.Server(uvicorn.Config(echo, log_level="critical", lifespan="off", http=Connection))
        server.config.port = 0
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return answer

    return asyncio.run(asyncio.wait_for(talk(), 30))


def head(length: int, body: int = 0) -> bytes:
    """A complete head of so many bytes."""
    lines = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\nX: %b\r\n\r\n"
    return lines % (body, b"x" * (length - len(lines % (body, b""))))


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\nX: ", *[b"x" * 1_000_000] * 64],
        [b"GET / HTTP/1.1\r\n", *[b"X: y\r\n" * 100_000] * 10],
        [b"GET /", *[b"x" * 100_000] * 10],
        [b"\r\n" * 50_000],
        [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", head(2 * HEAD_BYTES)],
        [head(HEAD_BYTES + 1)],
        [bytes([byte]) for byte in head(HEAD_BYTES + 1)],
    ],
    ids=["one header", "many headers", "a path", "empty lines", "a second request", "a byte", "one by one"],
)
def test_a_head_beyond_64_kib_is_answered_431(pieces):
    last = asked(*pieces).rpartition(b"HTTP/1.1 ")[2]
    assert last.startswith(b"431 ") and b"a request's head may have 65536 bytes" in last


@pytest.mark.parametrize("body", [0, 1, 3 * HEAD_BYTES, 5_000_000])
def test_a_head_of_64_kib_is_answered_with_any_body(body):
    answer = asked(head(HEAD_BYTES, body) + b"x" * body)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n%d\r\n0\r\n\r\n" % body)


@pytest.mark.parametrize(
    "rest", [b"0\r\nX: " + b"x" * 1_000_000, b"0\r\n" + b"X: y\r\n" * 100_000, b"3;" + b"x" * 1_000_000]
)
def test_what_follows_a_body_in_chunks_is_bounded(rest):
    assert asked(POST, rest) == b""


def test_a_body_in_small_chunks_is_read():
    assert asked(POST, b"1\r\nx\r\n" * 50_000, b"0\r\n\r\n", head(2 * HEAD_BYTES)).count(b"50003") == 1
