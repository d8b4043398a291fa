"""A model hub on loopback: it answers the requests of downloads and uploads, refuses all, or stays silent.

The tests' own hub, `NO_HUB`, is an address at which nobody answers, until a test starts a hub there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

REVISION = "0" * 40
_NOT_LET_IN = b'{"error": "Invalid credentials in Authorization header"}'


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

    With a `status` every answer has it. A `silent` hub takes requests and answers none. The `token` lets one
    upload, and see `private` models.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, bytes]],
        *,
        port: int = 0,
        status: int | None = None,
        silent: bool = False,
        token: str | None = None,
    ) -> None:
        self.models = {name: dict(files) for name, files in models.items()}
        self.private: set[str] = set()
        self.revision = REVISION
        self.fetched: list[str] = []
        self._large: dict[str, bytes] = {}  # by sha256, before a commit names them
        self._heads: list[str] = []
        self._ended = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_POST(self) -> None:
                self._take(self.rfile.read(int(self.headers["Content-Length"])))

            do_PUT = do_POST

            def _take(self, content: bytes) -> None:
                is_signed = self.path.startswith("/lfs/")  # such an address comes with leave to write there
                if not is_signed and self.headers["Authorization"] != f"Bearer {token}":
                    self._send(401, _NOT_LET_IN, True)
                    return
                status, answer = hub._uploaded(urlsplit(self.path).path.strip("/"), content)
                self._send(status, json.dumps(answer).encode(), True)

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
                is_let_in = token is not None and self.headers["Authorization"] == f"Bearer {token}"
                if path == "api/whoami-v2":
                    said = b'{"name": "me"}' if is_let_in else _NOT_LET_IN
                    self._send(200 if is_let_in else 401, said, body)
                    return
                model = next((name for name in hub.models if f"{name}/" in f"{path}/"), None)
                if model is None or (model in hub.private and not is_let_in):
                    self._send(
                        401, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"}
                    )
                    return
                files, verb = hub.models[model], path.partition(model)[2].strip("/")
                if verb.startswith("tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                        for name, data in files.items()
                    ]
                    self._send(200, json.dumps(tree).encode(), body)
                elif path.startswith("api/"):
                    names = [{"rfilename": name} for name in files]
                    info = {"id": model, "sha": hub.revision, "siblings": names}
                    info["private"] = model in hub.private
                    self._send(200, json.dumps(info).encode(), body)
                elif (name := verb.split("/", 2)[2]) not in files:
                    self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
                else:
                    if body:
                        hub.fetched.append(f"{model}/{name}")
                    headers = {"X-Repo-Commit": hub.revision, "ETag": f'"{_etag(files[name])}"'}
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

    def _uploaded(self, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
        """Take one request of an upload; returns status and answer."""
        if path.startswith("lfs/"):
            self._large[path.removeprefix("lfs/")] = content
            return 200, {}
        if path == "api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.models:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.models[name] = {".gitattributes": b"*.safetensors filter=lfs"}
            self.private |= {name} if asked.get("visibility") == "private" else set()
            return 200, {"url": f"{self.url}/{name}"}
        if path == "api/validate-yaml":  # a card's front matter
            return 200, {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": list(map(self._wanted, json.loads(content)["objects"])),
            }
        model, verb = re.fullmatch(r"api/models/([^/]+/[^/]+)/(\w+)/main", path).groups()
        if verb == "preupload":
            files = json.loads(content)["files"]
            modes = [
                {"path": file["path"], "uploadMode": _mode(file), "shouldIgnore": False} for file in files
            ]
            return 200, {"files": modes}
        self._commit(self.models[model], map(json.loads, content.splitlines()))
        return 200, {"commitUrl": f"{self.url}/{model}/commit/{self.revision}", "commitOid": self.revision}

    def _wanted(self, item: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}
        return item | ({} if item["oid"] in self._large else {"actions": upload})

    def _commit(self, files: dict[str, bytes], lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.revision = f"{int(self.revision, 16) + 1:040x}"

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


def _mode(file: Mapping[str, Any]) -> str:
    return "lfs" if file["size"] > 10**6 else "regular"
