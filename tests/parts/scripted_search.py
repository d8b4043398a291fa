"""A retrieval server that answers by a script."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from search.client import SearchClient
from search.wire import make_passage

ANSWER = {"result": [[make_passage("orrin", "Orrin", "A town.")]]}


class Script(ThreadingHTTPServer):
    """Answers each request with the next (status, body) of the script, the last one again and again.

    `retry_after` is sent with every answer that is not 200.
    """

    daemon_threads = True
    request_queue_size = 512
    allow_reuse_address = True

    def __init__(self, script: list[tuple[int, Any]], port: int = 0, retry_after: str = "") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script = script
        self.retry_after = retry_after
        self.times: list[float] = []
        self.together: threading.Barrier | None = None
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One answer by the script. Status 0 is a connection that hangs."""

    def do_POST(self) -> None:
        assert isinstance(self.server, Script)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        self.server.times.append(time.monotonic())
        status, answer = self.server.script[min(len(self.server.requests), len(self.server.script)) - 1]
        if self.server.together is not None:
            self.server.together.wait()
        if status == 0:
            self.server.closing.wait(60)
            return
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status != 200 and self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving(*script: tuple[int, Any], port: int = 0, retry_after: str = "") -> Iterator[Script]:
    server = Script(list(script), port, retry_after)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def retrieve(url: str, queries: list[str], **options: Any) -> Any:
    async def ask() -> Any:
        client = SearchClient(url, **options)
        try:
            return await client.retrieve(queries)
        finally:
            await client.aclose()

    return asyncio.run(ask())
