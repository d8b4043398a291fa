"""A model hub on loopback, which answers the four requests of a download, refuses all, or stays silent.

The tests' own hub, `NO_HUB`, is an address at which nobody answers, until a test starts a hub there.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

REVISION = "0" * 40


# Bound and never listening: connections are refused, and no other process can take the port.
_RESERVED = socket.socket()
_RESERVED.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
_RESERVED.bind(("127.0.0.1", 0))
NO_HUB: int = _RESERVED.getsockname()[1]
"""The port of the hub that this process's environment names."""


class _Server(ThreadingHTTPServer):
    allow_reuse_port = True


class LoopbackHub:
    """Serves `models` (hub id, file name, content). `fetched` lists the files whose content was requested.

    With a `status` every answer has it. A `silent` hub takes requests and answers none.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, bytes]],
        *,
        port: int = 0,
        status: int | None = None,
        silent: bool = False,
    ) -> None:
        self.fetched: list[str] = []
        self._heads: list[str] = []
        self._ended = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                path = urlsplit(self.path).path.lstrip("/")
                if not body:
                    hub._heads.append(f"/{path}")
                if silent:
                    hub._ended.wait()
                    return
                if status:
                    self._send(status, b'{"error": "refused"}', body)
                    return
                model = next((name for name in models if f"{name}/" in f"{path}/"), None)
                if model is None:
                    self._send(
                        401, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"}
                    )
                    return
                files, verb = models[model], path.partition(model)[2].strip("/")
                if verb.startswith("tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                        for name, data in files.items()
                    ]
                    self._send(200, json.dumps(tree).encode(), body)
                elif path.startswith("api/"):
                    names = [{"rfilename": name} for name in files]
                    info = {"id": model, "sha": REVISION, "siblings": names}
                    self._send(200, json.dumps(info).encode(), body)
                else:
                    name = verb.split("/", 2)[2]
                    if body:
                        hub.fetched.append(f"{model}/{name}")
                    headers = {"X-Repo-Commit": REVISION, "ETag": f'"{_etag(files[name])}"'}
                    self._send(200, files[name], body, headers)

            def _send(self, status: int, data: bytes, body: bool, headers: Mapping[str, str] = {}) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def asked(self) -> list[str]:
        """The paths of HEAD requests, which come first for each file."""
        return list(self._heads)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
