"""Closed-loop clients in one process: each sends a query, waits for the answer, checks it, sends the next.

    python -m bench.closed_loop ORDER.json    # `Order`, written by bench/retrieval.py

It prints "started" when all clients are connected, and runs until its stdin closes. The HTTP client is forty
lines over asyncio, because clients share the cores with the server. An answer must have status 200, enough
hits, and scores in order. One with the expected passage is likely right. All others, and one in `SAMPLED` of
these, are recorded and compared with the vectors later (`Truth.check`).
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.retrieval_world import Queries, Stream, query_number, request_number

TOPK = 3
KEPT = 1000
"""Number of answers that are recorded unconditionally, for the recall."""
SAMPLED = 50


@dataclass(frozen=True)
class Order:
    """The load: query n of the stream is line `base + n` of the file `queries`, wrapped around."""

    port: int
    clients: int
    stream: Stream
    base: int
    queries: str
    record: str

    @classmethod
    def read(cls, path: Path) -> "Order":
        """Read a written order."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write it for the client process."""
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Record:
    """Per request: `begun`, `ended` (monotonic seconds), `asked` (query numbers), and `answers` with scores.

    `refused` counts answers 503, which are repeated.
    """

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    answers: list[tuple[int, list[str], list[float]]] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    malformed: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Count an error by its message."""
        self.errors[reason] = self.errors.get(reason, 0) + 1


class Connection:
    """One keep-alive HTTP/1.1 connection with Content-Length, which all peers send."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Connect."""
        self._streams = await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send one request and return status, headers and body of its answer."""
        if self._streams is None:
            await self.open()
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(
            b"POST /retrieve HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head[:-4].split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        content = await reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":
            self.close()
        return int(status[9:12]), headers, content

    def close(self) -> None:
        """Drop the connection. The next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Load:
    """All clients of one order."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.queries = Queries.read(Path(order.queries))
        self.record = Record()
        self.running = True

    async def run(self, ends: asyncio.Event) -> None:
        """Connect, print "started", ask until `ends` is set, let every client finish its last request."""
        connections = [Connection(self.order.port) for _ in range(self.order.clients)]
        for connection in connections:
            await connection.open()
        print("started", flush=True)
        clients = [asyncio.create_task(self._client(*numbered)) for numbered in enumerate(connections)]
        await ends.wait()
        self.running = False
        await asyncio.gather(*clients)

    async def _client(self, number: int, connection: Connection) -> None:
        turn = 0
        while self.running:
            request = request_number(number, self.order.clients, turn)
            await self._ask(connection, self.order.base + query_number(self.order.stream, request))
            turn += 1
        connection.close()

    async def _ask(self, connection: Connection, asked: int) -> None:
        query = self.queries.texts[asked % len(self.queries.texts)]
        body = json.dumps({"queries": [query], "topk": TOPK, "return_scores": True}).encode()
        begun = time.monotonic()
        while True:
            try:
                status, headers, content = await connection.post(body)
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.close()
                self.record.lost += 1
                self.record.fail(type(error).__name__)
                await asyncio.sleep(0.1)
                return
            if status != 503:
                break
            self.record.refused += 1
            if not self.running:
                return
            await asyncio.sleep(float(headers.get(b"retry-after", b"1")))
        if status != 200:
            self.record.fail(f"HTTP {status}")
            return
        self.record.begun.append(begun)
        self.record.ended.append(time.monotonic())
        self.record.asked.append(asked)
        self._check(asked, json.loads(content))

    def _check(self, asked: int, answer: dict[str, Any]) -> None:
        (hits,) = answer["result"]
        titles = [hit["document"]["title"] for hit in hits]
        scores = [hit["score"] for hit in hits]
        if len(hits) != TOPK or scores != sorted(scores, reverse=True):
            self.record.malformed += 1
        belongs = self.queries.titles[asked % len(self.queries.titles)] in titles
        if not belongs or len(self.record.answers) < KEPT or len(self.record.asked) % SAMPLED == 0:
            self.record.answers.append((asked, titles, scores))


async def _main(order: Order) -> None:
    ends = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ends.set)  # readable once it is closed
    load = Load(order)
    await load.run(ends)
    Path(order.record).write_text(json.dumps(asdict(load.record)))


if __name__ == "__main__":
    uvloop.run(_main(Order.read(Path(sys.argv[1]))))
