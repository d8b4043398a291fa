"""The server's HTTP layer: Search-R1's wire format, limits, token, health, metrics, access log.

`POST /retrieve` is plain ASGI: at a thousand requests a second each layer costs as much as the answer's JSON.
A token protects `/retrieve` and `/index`. The other paths stay open for load balancers and Prometheus.
"""

import asyncio
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response, Security, params
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic takes typing.TypedDict from Python 3.12 on only

from drzero.ops.connections import PIECE
from search.serving.batching import IndexUnavailable, Unavailable
from search.serving.encoders import EncodeFailed
from search.serving.service import Retrieval
from search.wire import MAX_TOPK, Passage, ScoredPassage

# Search-R1's trainer sends a whole step's queries in one request.
MAX_QUERIES = 4096
MAX_QUERY_CHARS = 8192
MAX_BODY_BYTES = 8 << 20
# While the queue is full, no longer body is read, to bound memory. The cache may answer a shorter one.
SMALL_BODY_BYTES = 64 << 10
MAX_PASSAGES = 10 * MAX_QUERIES  # Ten per query in the largest request: some 100 MB with passages of 2 KB
# For all requests together, until the last byte is sent: slow clients hold their answers in memory.
MAX_PASSAGES_HELD = 4 * MAX_PASSAGES
DEFAULT_TOPK = 3
INDEX_UNAVAILABLE = 424  # `/health`'s status while restarting the server would not help: Failed Dependency
CLIENT_GONE = 499  # As nginx logs a client that closed its connection before the answer. It is never sent.
_CLOSE = {"connection": "close"}

Query = Annotated[str, msgspec.Meta(max_length=MAX_QUERY_CHARS)]
# Some clients send 3.0, which is an integer in JSON.
Topk = (
    Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPK)]
    | Annotated[float, msgspec.Meta(ge=1, le=MAX_TOPK, multiple_of=1)]
)


class RetrieveRequest(msgspec.Struct):
    """Body of `POST /retrieve`. `topk` is the number of passages per query, 3 by default."""

    queries: Annotated[list[Query], msgspec.Meta(min_length=1, max_length=MAX_QUERIES)]
    topk: Topk | None = None
    return_scores: bool = False


@dataclass
class Failure:
    """The body of an answer other than 200."""

    detail: str


_decode = msgspec.json.Decoder(RetrieveRequest).decode


class RetrievalApp:
    """The ASGI app. It requires `token` if given. `access_log` writes a JSON line per request to stdout."""

    def __init__(self, retrieval: Retrieval, token: str | None = None, access_log: bool = False) -> None:
        self.retrieval = retrieval
        self._credentials = None if token is None else f"Bearer {token}".encode()
        self._access_log = access_log
        self._passages_held = 0
        self._rest = _rest(retrieval, self._check_token, with_token=token is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # there are no websockets, and nothing to do at start and end
            return await self._rest(scope, receive, send)
        started = time.perf_counter()
        record = {"status": 0, "queries": 0, "topk": 0, "bytes": 0}

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
            record["bytes"] += len(message.get("body", b""))
            await send(message)

        is_retrieve = scope["path"] == "/retrieve"
        try:
            if is_retrieve:
                await self._retrieve(scope, receive, recorded, record)
            else:
                await self._rest(scope, receive, recorded)
        finally:
            seconds, status = time.perf_counter() - started, record["status"]
            if is_retrieve:
                metrics = self.retrieval.metrics
                metrics.requests.inc()
                metrics.seconds.observe(seconds)
                if status == CLIENT_GONE:
                    metrics.gone.inc()
                elif status >= 400:
                    metrics.errors.labels(str(status)).inc()
            if self._access_log:  # without the queries and headers
                client = scope.get("client")
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "client": client[0] if client else None,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(seconds, 6),
                    **record,
                }
                print(json.dumps(line), flush=True)

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send, record: dict[str, int]) -> None:
        status, headers, held = 200, [(b"content-type", b"application/json")], 0
        try:
            try:
                request = await self._receive(scope, receive)
                topk = int(request.topk or DEFAULT_TOPK)
                record |= {"queries": len(request.queries), "topk": topk}
                held = self._hold(len(request.queries) * topk)
                body = await self._answer(request, topk, receive)
            except HTTPException as refusal:
                status, body = refusal.status_code, msgspec.json.encode(Failure(refusal.detail))
                more = refusal.headers or {}
                headers += [(name.encode(), value.encode()) for name, value in more.items()]
            if status == CLIENT_GONE:
                record["status"] = status
                return
            headers.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            # Each piece waits until the client has read most of the one before.
            for start in range(0, len(body), PIECE):
                end = start + PIECE
                piece = {"body": body[start:end], "more_body": end < len(body)}
                await send({"type": "http.response.body", **piece})
        finally:
            self._passages_held -= held

    def _hold(self, passages: int) -> int:
        """Reserve room for an answer and return its size. Raises HTTPException without room."""
        if passages > MAX_PASSAGES:
            raise HTTPException(422, f"queries × topk is more than {MAX_PASSAGES}: ask in several requests")
        if self._passages_held + passages > MAX_PASSAGES_HELD:
            raise _busy(f"overloaded: {self._passages_held} passages are being found or sent")
        self._passages_held += passages
        return passages

    async def _receive(self, scope: Scope, receive: Receive) -> RetrieveRequest:
        batcher = self.retrieval.batcher
        batcher.expect()
        try:
            request = Request(scope, receive)
            self._admit(request)
            if request.method != "POST":
                raise HTTPException(405, "only POST is answered here", {"allow": "POST"})
            return await self._read(request)
        finally:
            batcher.arrived()

    async def _answer(self, request: RetrieveRequest, topk: int, receive: Receive) -> bytes:
        task = asyncio.current_task()

        async def cancel_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if task is not None:
                task.cancel()

        watcher = asyncio.create_task(cancel_when_gone())
        try:
            found = await self.retrieval.search(request.queries, topk)
        except Unavailable as error:
            raise _busy(str(error)) from error
        except asyncio.CancelledError:
            if not watcher.done():
                raise  # not by the watcher: the server is closing
            raise HTTPException(CLIENT_GONE, "") from None
        except Exception as error:  # the model or the index failed on these queries
            raise HTTPException(500, f"retrieval failed: {_plain(error)}") from error
        finally:
            watcher.cancel()
        lists = (hits.scored() if request.return_scores else hits.plain() for hits in found)
        return b'{"result":[%b]}' % b",".join(lists)

    def _check_token(self, request: Request) -> None:
        """Raise HTTPException unless it holds the token, compared in constant time, or none is needed."""
        credentials = request.headers.get("authorization", "").encode("latin-1")
        if self._credentials is not None and not hmac.compare_digest(credentials, self._credentials):
            raise HTTPException(401, "a bearer token is needed", {"www-authenticate": "Bearer"})

    def _admit(self, request: Request) -> None:
        """Raise HTTPException for a bad token, while draining, or for a body announced as too long."""
        self._check_token(request)
        length = int(request.headers.get("content-length", 0))
        if self.retrieval.draining:
            raise _busy("the server is shutting down", _CLOSE)
        if length > MAX_BODY_BYTES:
            raise _too_large()
        if length > SMALL_BODY_BYTES:
            try:
                self.retrieval.batcher.check_room(1)
            except Unavailable as error:
                raise _busy(str(error), _CLOSE) from error

    async def _read(self, request: Request) -> RetrieveRequest:
        """Return the body's request. Raises HTTPException as soon as it is too large, too slow or invalid."""
        body, deadline_s = bytearray(), self.retrieval.limits.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
        except ClientDisconnect:
            raise HTTPException(CLIENT_GONE, "") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {deadline_s:g} s", _CLOSE) from None
        try:
            return _decode(body)
        except msgspec.ValidationError as error:
            raise HTTPException(422, str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = "is no JSON, is nested too deep, or holds invalid Unicode"
            raise HTTPException(422, f"the body {what}: {error}") from None


def _busy(detail: str, headers: Mapping[str, str] = {}) -> HTTPException:
    # Clients add jitter, so that not all return together.
    return HTTPException(503, detail, {"retry-after": "1", **headers})


def _too_large() -> HTTPException:
    # The rest of the body stays unread, so the connection cannot be reused.
    return HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes", _CLOSE)


def _plain(error: Exception) -> str:
    return str(error) if isinstance(error, EncodeFailed) else f"{type(error).__name__}: {error}"


# --- the paths that are not performance-critical, and the documentation ---

_REASON_401 = "No bearer token, or a wrong one"


class Answer(TypedDict):
    """Body of an answer to `POST /retrieve`: one list per query, best first."""

    result: list[list[Passage | ScoredPassage]]


def _rest(retrieval: Retrieval, check_token: Callable[[Request], None], with_token: bool) -> FastAPI:
    # Its /docs loads nothing from elsewhere: there may be no network.
    app = FastAPIOffline(title="Dr. Zero retrieval", redoc_url=None)
    store, needs_token = retrieval.store, {401: _REASON_401} if with_token else {}
    reading = asyncio.Lock()  # FAISS may read its whole corpus for one

    def described() -> dict[str, str | int | bool]:
        return {"collection": store.name, **store.info.to_metadata()}

    async def admit(request: Request) -> None:
        check_token(request)

    guards = [*_security(with_token), Depends(admit)]

    @app.get("/index", responses=_failures(needs_token), dependencies=guards)
    async def index() -> Response:
        """Return the name of the served collection and how it was built."""
        return JSONResponse(described())

    @app.get(
        "/passages/{key:path}",
        responses=_failures(needs_token | {404: "The index has no passage with this id"}),
        dependencies=guards,
    )
    async def passage(key: str) -> Response:
        """Return the text of one passage, its title on the first line."""
        async with reading:
            found = await asyncio.to_thread(store.passages_of, [key])
        if key not in found:
            raise HTTPException(404, f"no passage {key!r}")
        return JSONResponse({"id": key, "text": found[key]})

    @app.get(
        "/health",
        responses=_failures(
            {
                INDEX_UNAVAILABLE: "The server works, but its index does not answer",
                503: "The canary query was not answered",
            }
        ),
    )
    async def health() -> Response:
        """Return 200 if a canary query has just been answered, else 503 or 424 with the reason."""
        try:
            if retrieval.draining:
                raise Unavailable("the server is shutting down")
            await retrieval.check()
        except Exception as error:  # any error that a query would get
            reason = str(error) if isinstance(error, Unavailable) else _plain(error)
            status = INDEX_UNAVAILABLE if isinstance(error, IndexUnavailable) else 503
            if with_token:  # who has none learns of a place only its last name
                reason = re.sub(r"\S*/", "", reason)
            return JSONResponse({"detail": reason}, status, {"Retry-After": "1"})
        return JSONResponse({"status": "ok", **({} if with_token else described())})

    @app.get("/metrics", response_class=Response)
    async def metrics(_: Request) -> Response:
        """Return the metrics as Prometheus text."""
        return Response(generate_latest(retrieval.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _describe_retrieve(app, with_token)
    return app


def _describe_retrieve(app: FastAPI, with_token: bool) -> None:
    """Add `POST /retrieve`, which `RetrievalApp` answers itself, to the OpenAPI document."""
    reasons = {
        405: "Not a POST",
        408: "The body arrived too slowly",
        413: f"More than {MAX_BODY_BYTES} bytes",
        422: "Not a valid request; the message names the limit",
        500: "The model or the index failed on this request",
        503: "Overloaded, shutting down, or without its index; Retry-After gives the seconds to wait",
    }
    if with_token:
        reasons[401] = _REASON_401
    _, schemas = msgspec.json.schema_components([RetrieveRequest])
    body = {"required": True, "content": {"application/json": {"schema": schemas["RetrieveRequest"]}}}

    @app.post(
        "/retrieve",
        operation_id="retrieve",
        response_model=Answer,
        responses=_failures(reasons),
        openapi_extra={"requestBody": body},
        dependencies=_security(with_token),
    )
    async def retrieve() -> None:
        """Return the nearest passages of each query."""
        raise AssertionError("for the OpenAPI document only")


def _security(with_token: bool) -> list[params.Depends]:
    return [Security(HTTPBearer(auto_error=False))] if with_token else []


def _failures(reasons: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Failure, "description": reason} for status, reason in reasons.items()}
