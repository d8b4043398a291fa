"""A model hub on loopback, which answers the four requests that a download makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

REVISION = "0" * 40


class LoopbackHub:
    """Serves `models` (hub id, file name, content); `fetched` lists the files whose content was asked for."""

    def __init__(self, models: Mapping[str, Mapping[str, bytes]]) -> None:
        self.fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                path = urlsplit(self.path).path.lstrip("/")
                model = next((name for name in models if f"{name}/" in f"{path}/"), None)
                if model is None:
                    self._send(
                        401, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"}
                    )
                    return
                files, verb = models[model], path.removeprefix("api/models/").removeprefix(model).strip("/")
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

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
