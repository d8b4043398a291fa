"""Contents by hash, and the HTTP server for those too large for a request: Modal's object store."""

import base64
import hashlib
import os
import tempfile
import urllib.parse
import uuid
from collections.abc import AsyncIterable, Callable
from pathlib import Path

from aiohttp import web
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.servicer import Reply

BLOCK = 8 * 2**20
"""Bytes of a block. A volume's files are downloaded block by block."""


class Contents:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def path(self, sha256: str) -> Path:
        return self._folder / sha256

    def read(self, sha256: str) -> bytes:
        return self.path(sha256).read_bytes()

    def add(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self:
            self.path(sha256).write_bytes(content)
        return sha256

    async def receive(self, chunks: AsyncIterable[bytes]) -> tuple[str, str]:
        """Keep what arrives. Returns its SHA-256 and its MD5, both in hex."""
        sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        descriptor, partial = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            async for chunk in chunks:
                sha256.update(chunk)
                md5.update(chunk)
                file.write(chunk)
        os.replace(partial, self.path(sha256.hexdigest()))
        return sha256.hexdigest(), md5.hexdigest()


class Blobs:
    """Handlers and HTTP server of blobs, and of the file that `file_of` has for a volume's id and a path."""

    def __init__(self, contents: Contents, file_of: Callable[[str, str], Path]) -> None:
        self._contents = contents
        self._file_of = file_of
        self._hashes: dict[str, str] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.put("/blob/{id}", self._put_blob),
                web.get("/blob/{id}", self._get_blob),
                web.get("/file/{volume}", self._get_file),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def sha256(self, blob_id: str) -> str:
        if blob_id not in self._hashes:
            raise GRPCError(Status.NOT_FOUND, f"Blob {blob_id} not found")
        return self._hashes[blob_id]

    def file_url(self, volume_id: str, path: str, start: int, length: int) -> str:
        """Where a client downloads a part of a volume's file, in bytes."""
        query = urllib.parse.urlencode({"path": path, "start": start, "length": length})
        return f"{self.url}/file/{volume_id}?{query}"

    async def BlobCreate(self, request: api_pb2.BlobCreateRequest) -> Reply:
        blob_id = f"bl-{uuid.uuid4().hex[:22]}"
        known = base64.b64decode(request.content_sha256_base64).hex()
        if known in self._contents:
            self._hashes[blob_id] = known
        urls = api_pb2.UploadUrlList(items=[f"{self.url}/blob/{blob_id}"])
        return dict(blob_id=blob_id, blob_ids=[blob_id], upload_urls=urls)

    async def BlobGet(self, request: api_pb2.BlobGetRequest) -> Reply:
        self.sha256(request.blob_id)
        return dict(download_url=f"{self.url}/blob/{request.blob_id}")

    async def _put_blob(self, request: web.Request) -> web.Response:
        sha256, md5 = await self._contents.receive(request.content.iter_any())
        self._hashes[request.match_info["id"]] = sha256
        # The client compares it with its own: an object store's ETag is the content's MD5.
        return web.Response(headers={"ETag": f'"{md5}"'})

    async def _get_blob(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._contents.path(self._hashes[request.match_info["id"]]))

    async def _get_file(self, request: web.Request) -> web.Response:
        path = self._file_of(request.match_info["volume"], request.query["path"])
        with path.open("rb") as file:
            file.seek(int(request.query["start"]))
            return web.Response(body=file.read(int(request.query["length"])))
