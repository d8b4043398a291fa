"""A run's report served on loopback while the run continues: the page reloads when the run's files change.

`/NAME/` is the page and `/NAME/version` a hash of its files' sizes and times. Requests must name this
machine, because a foreign page could otherwise reach the server under another name.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import quote, unquote, urlsplit

from drzero.ops.process.lock import lock_is_held
from drzero.runs.loop_folder import stage_runs
from drzero.runs.report.page import make_page, waiting_page
from drzero.runs.run_folder import NotARun, RunFolder

_WATCHED = ("*.json", "*.jsonl", "resolved.yaml", "logs/events.jsonl", "dumps/*.jsonl", "metrics/*.jsonl")
_LINKED = (".json", ".jsonl", ".yaml", ".html")
_RESTS = 9  # the page rests nine times as long as it took to make, which costs at most a tenth of a core


class LivePage:
    """The page of a folder, made again when its files have changed, and seldom if that takes long."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._lock = Lock()
        self._made = ("", b"")
        self._rests_until = -math.inf

    @property
    def folders(self) -> list[Path]:
        """The folders the page is made of: the run's, and a loop's stages. None before there is a run."""
        try:
            run = RunFolder(self.folder)
            return [self.folder, *(part.folder for part in stage_runs(run))]
        except NotARun:
            return []

    def version(self) -> str:
        """Changes with the size or time of any file of the page, and when the run begins or ends."""
        if self._clock() < self._rests_until:
            return self._made[0]
        files = sorted(path for folder in self.folders for name in _WATCHED for path in folder.glob(name))
        known: list[object] = [lock_is_held(self.folder / "lock")]
        for path in files:
            with suppress(FileNotFoundError):  # a restarted run removes some
                status = path.stat()
                known.append((str(path), status.st_size, status.st_mtime_ns))
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def html(self) -> bytes:
        """The present page."""
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                began = self._clock()
                try:
                    page = make_page(RunFolder(self.folder), version)
                except NotARun as reason:
                    page = waiting_page(f"{reason}: this page waits for it")
                self._made = version, page.encode()
                ended = self._clock()
                self._rests_until = ended + _RESTS * (ended - began)
            return self._made[1]


class Handler(BaseHTTPRequestHandler):
    """Answers GET from this machine."""

    timeout = 60.0  # for the head of a request; Python bounds its length

    def __init__(self, live: LivePage, *arguments: object) -> None:
        self._live = live
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with the page, its version, or a file of the run."""
        with suppress(ConnectionError):  # a browser that reloads drops its last request
            self._answer()

    def _answer(self) -> None:
        host, path = self.headers.get("Host", "").partition(":")[0], unquote(urlsplit(self.path).path)
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == f"/{self._live.folder.name}/":
            self._send(self._live.html(), "text/html")
        elif path == f"/{self._live.folder.name}/version":
            self._send(self._live.version().encode(), "text/plain")
        elif (file := self._linked(path)) is not None:
            self._send(file.read_bytes(), "text/html" if file.suffix == ".html" else "text/plain")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _linked(self, path: str) -> Path | None:
        file = Path(os.path.realpath(self._live.folder.parent / path.lstrip("/").replace("\0", "")))
        is_inside = any(file.is_relative_to(folder) for folder in self._live.folders)
        return file if is_inside and file.suffix in _LINKED and os.path.isfile(file) else None

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged."""


def live_server(live: LivePage, port: int) -> ThreadingHTTPServer:
    """The server, bound and not yet serving. Raises OSError if the port is taken."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, live))


def serve_report(folder: Path, port: int) -> None:
    """Print the address and serve until interrupted. The folder may get its run later."""
    live = LivePage(folder)
    with live_server(live, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/{quote(folder.name)}/"
        follows = "follows" if live.folders else "waits for a run in"
        print(f"{address} {follows} {folder}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
