"""The server's HTTP side: Search-R1's wire format, limits, token, health, metrics, access log.

`POST /retrieve` is a plain ASGI function, because at a thousand requests a second each layer above one costs
as much as the answer's JSON; `Request` below both validates it and describes it in the OpenAPI document. The
other paths are FastAPI's: `GET /health`, `/metrics`, `/docs`, `/openapi.json`.

With a token, `/retrieve` asks for it (`Authorization: Bearer …`). The other paths stay open: load balancers,
supervisors and Prometheus have no token, nothing of the corpus is there, and all who ask for health together
cost one query at a time.
"""

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from search.batching import IndexAway, Unavailable
from search.encoders import EncodeFailed
from search.service import Retrieval
from search.wire import MAX_TOPK, Passage, ScoredPassage

# A batch trainer such as Search-R1 sends the queries of a whole step in one request.
MAX_QUERIES = 4096
MAX_QUERY_CHARS = 8192
MAX_BODY_BYTES = 8 << 20
# A longer body is not read while the queue is full: what thousands of clients send would fill the memory. A
# shorter one has come with its head, and may be answered from the cache.
SMALL_BODY_BYTES = 64 << 10
# Ten for each of the most queries: an answer of some 100 MB with passages of 2 KB.
MAX_PASSAGES = 10 * MAX_QUERIES
DEFAULT_TOPK = 3
INDEX_AWAY = 424
"""Status of `/health` while starting the server again would not help: Failed Dependency."""
SCHEMAS = "#/components/schemas/{name}"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

Query = Annotated[str, msgspec.Meta(max_length=MAX_QUERY_CHARS)]
# JSON knows one kind of number: 3.0 is an integer there, and some clients write it so.
Topk = (
    Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPK)]
    | Annotated[float, msgspec.Meta(ge=1, le=MAX_TOPK, multiple_of=1)]
)


class RetrieveRequest(msgspec.Struct):
    """Body of `POST /retrieve`. `topk` is the number of passages a query, 3 if not given."""

    queries: Annotated[list[Query], msgspec.Meta(min_length=1, max_length=MAX_QUERIES)]
    topk: Topk | None = None
    return_scores: bool = False


class Failure(msgspec.Struct):
    """What was wrong."""

    detail: str


class Refused(Exception):
    """A request that gets another answer than passages."""

    def __init__(self, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(detail)
        self.status, self.headers = status, headers


class _ClientGone(Exception):
    """Nobody is there to answer to."""


@dataclass
class _Record:
    """What the access log and the metrics say of one request."""

    status: int = 0
    queries: int = 0
    topk: int = 0
    size: int = 0


_decode = msgspec.json.Decoder(RetrieveRequest).decode
_CLOSE = (b"connection", b"close")


class RetrievalApp:
    """The ASGI app. `token`: asked for if given; `access_log`: a line of JSON a request on stdout."""

    def __init__(self, retrieval: Retrieval, token: str | None = None, access_log: bool = False) -> None:
        self.retrieval = retrieval
        self._credentials = None if token is None else f"Bearer {token}".encode()
        self._access_log = access_log
        self._rest = _rest(retrieval, with_token=token is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # there are no websockets, and nothing to do at start and end
            return await self._rest(scope, receive, send)
        started, record = time.perf_counter(), _Record()
        try:
            if scope["path"] == "/retrieve":
                await self._retrieve(scope, receive, send, record)
            else:
                await self._other(scope, receive, send, record)
        finally:
            seconds = time.perf_counter() - started
            if scope["path"] == "/retrieve":
                self._count(record, seconds)
            if self._access_log:
                _log(scope, record, seconds)

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send, record: _Record) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ()
        try:
            record.status, body = 200, await self._answer(scope, receive, record)
        except Refused as refusal:
            record.status, headers = refusal.status, refusal.headers
            body = msgspec.json.encode(Failure(str(refusal)))
        except _ClientGone:
            record.status = 499  # nginx's word for it
            return
        record.size = len(body)
        await _send(send, record.status, body, headers)

    async def _answer(self, scope: Scope, receive: Receive, record: _Record) -> bytes:
        batcher = self.retrieval.batcher
        batcher.expect()
        try:
            length = self._admit(scope)
            if scope["method"] != "POST":
                raise Refused(405, "only POST is answered here", (b"allow", b"POST"))
            request = _parse(await self._read(receive, length))
        finally:
            batcher.arrived()
        topk = int(request.topk or DEFAULT_TOPK)
        record.queries, record.topk = len(request.queries), topk
        if len(request.queries) * topk > MAX_PASSAGES:
            raise Refused(422, f"queries × topk is more than {MAX_PASSAGES}: ask in several requests")
        watcher = asyncio.create_task(_cancel_when_gone(receive, asyncio.current_task()))
        try:
            found = await self.retrieval.search(request.queries, topk)
        except Unavailable as error:
            raise _busy(str(error), error.retry_after_s) from error
        except asyncio.CancelledError:
            if not watcher.done():
                raise  # somebody else's: the server is closing
            raise _ClientGone from None
        except Exception as error:  # the model or the index failed on this request's queries
            raise Refused(500, f"retrieval failed: {_plain(error)}") from error
        finally:
            watcher.cancel()
        lists = (hits.scored() if request.return_scores else hits.plain() for hits in found)
        return b'{"result":[%b]}' % b",".join(lists)

    def _admit(self, scope: Scope) -> int:
        """Return the announced length of the body (0 if none is); raises Refused for who may not ask."""
        length, credentials = 0, b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value)
            elif name == b"authorization":
                credentials = value
        if self._credentials is not None and not hmac.compare_digest(credentials, self._credentials):
            raise Refused(401, "a bearer token is needed", (b"www-authenticate", b"Bearer"))
        if self.retrieval.draining:
            raise _busy("the server is shutting down", 1, _CLOSE)
        if length > MAX_BODY_BYTES:
            raise _too_large()
        if length > SMALL_BODY_BYTES:
            try:
                self.retrieval.check_room(1)
            except Unavailable as error:
                raise _busy(str(error), error.retry_after_s, _CLOSE) from error
        return length

    async def _read(self, receive: Receive, length: int) -> bytes:
        """Return the body; raises Refused as soon as it is too large, or slower than a request may take."""
        chunks, size, deadline_s = [], 0, self.retrieval.limits.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > MAX_BODY_BYTES:
                        raise _too_large()
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {deadline_s:g} s", _CLOSE) from None

    async def _other(self, scope: Scope, receive: Receive, send: Send, record: _Record) -> None:
        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            record.size += len(message.get("body", b""))
            await send(message)

        await self._rest(scope, receive, noting)

    def _count(self, record: _Record, seconds: float) -> None:
        metrics = self.retrieval.metrics
        metrics.requests.inc()
        metrics.seconds.observe(seconds)
        if record.status == 499:
            metrics.gone.inc()
        elif record.status >= 400:
            metrics.errors.labels(str(record.status)).inc()


def _parse(body: bytes) -> RetrieveRequest:
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise Refused(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(422, f"the body is no JSON, or holds text that is no valid Unicode: {error}") from None


async def _cancel_when_gone(receive: Receive, task: "asyncio.Task[Any] | None") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if task is not None:
        task.cancel()


async def _send(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    own: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


def _busy(detail: str, retry_after_s: int, *headers: tuple[bytes, bytes]) -> Refused:
    return Refused(503, detail, (b"retry-after", b"%d" % retry_after_s), *headers)


def _too_large() -> Refused:
    # The rest of the body is not read, so the connection cannot be used again.
    return Refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes", _CLOSE)


def _plain(error: Exception) -> str:
    return str(error) if isinstance(error, EncodeFailed) else f"{type(error).__name__}: {error}"


def _log(scope: Scope, record: _Record, seconds: float) -> None:
    """Write a line; what was asked is not in it, nor any header."""
    client = scope.get("client")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status,
        "seconds": round(seconds, 6),
        "queries": record.queries,
        "topk": record.topk,
        "bytes": record.size,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# --- the paths that need not be fast ---


def _rest(retrieval: Retrieval, with_token: bool) -> FastAPI:
    app = FastAPI(title="Dr. Zero retrieval", redoc_url=None)

    failures: dict[int | str, dict[str, Any]] = {
        INDEX_AWAY: _described("The server works, and its index does not answer"),
        503: _described("The canary query was not answered"),
    }

    @app.get("/health", responses=failures)
    async def health() -> Response:
        """Answer 200 when a canary query has just been answered, else 503 or 424 with the reason."""
        try:
            if retrieval.draining:
                raise Unavailable("the server is shutting down")
            await retrieval.check()
        except Exception as error:  # whatever queries would get
            reason = str(error) if isinstance(error, Unavailable) else _plain(error)
            status = INDEX_AWAY if isinstance(error, IndexAway) else 503
            return JSONResponse({"detail": reason}, status, {"Retry-After": "1"})
        if with_token:
            return JSONResponse({"status": "ok"})
        store = retrieval.store
        return JSONResponse({"status": "ok", "collection": store.name, **store.info.to_metadata()})

    @app.get("/metrics", response_class=Response)
    async def metrics(_: Request) -> Response:
        """Return the metrics as Prometheus text."""
        return Response(generate_latest(retrieval.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _add_retrieve(describe(), with_token)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    return app


def _add_retrieve(document: dict[str, Any], with_token: bool) -> None:
    """Describe `POST /retrieve` in an OpenAPI document, from the types that validate it."""
    (asked, plain, scored, failure), schemas = msgspec.json.schema_components(
        [RetrieveRequest, Passage, ScoredPassage, Failure], ref_template=SCHEMAS
    )
    hits = {"type": "array", "items": {"anyOf": [plain, scored]}}
    result = {"type": "array", "items": hits, "description": "one list a query, best first"}
    answer = {"type": "object", "required": ["result"], "properties": {"result": result}}
    reasons = {
        "405": "Not a POST",
        "408": "The body came too slowly",
        "413": f"More than {MAX_BODY_BYTES} bytes",
        "422": "Not a valid request; the limit is told",
        "500": "The model or the index failed on this request",
        "503": "Overloaded, shutting down, or without its index; Retry-After tells when to ask again",
    }
    if with_token:
        reasons["401"] = "No bearer token, or a wrong one"
    operation: dict[str, Any] = {
        "summary": "Return the nearest passages of each query",
        "operationId": "retrieve",
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "The passages", "content": {"application/json": {"schema": answer}}},
            **{
                status: {"description": reason, "content": {"application/json": {"schema": failure}}}
                for status, reason in reasons.items()
            },
        },
    }
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    if with_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        operation["security"] = [{"token": []}]
    document["paths"]["/retrieve"] = {"post": operation}


def _described(reason: str) -> dict[str, Any]:
    return {
        "description": reason,
        "content": {
            "application/json": {"schema": {"type": "object", "properties": {"detail": {"type": "string"}}}}
        },
    }
