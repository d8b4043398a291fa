"""The retrieval server: Search-R1's wire format over a Chroma collection.

    python -m search.server --chroma-path chromadb --collection wiki --port 8000

Endpoints: `POST /retrieve` (see `search.wire`), `GET /health` (200 when a canary query has been answered),
`GET /metrics` (Prometheus text), `GET /docs`. The event loop only parses and formats; embedding and index run
in the batcher's thread. The server refuses to start, with exit code 2 and one line, if the embedder does not
fit the collection or the port is taken.
"""

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from pydantic import BaseModel, Field, StringConstraints
from setproctitle import setproctitle

from search.batching import Batcher
from search.embedders import Embedder, EmbedderError, EmbedderSpec
from search.store import Store, StoreError, open_collection
from search.wire import Passage, ScoredPassage

# A batch trainer such as Search-R1 sends the queries of a whole step in one request.
MAX_QUERIES = 4096
MAX_QUERY_CHARS = 8192
MAX_TOPK = 100
DEFAULT_TOPK = 3
DEADLINE_S = 30.0
CANARY = "canary"


# The constraint also refuses lone surrogates, on which the tokenizer would fail the whole batch.
Query = Annotated[str, StringConstraints(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    """Body of `POST /retrieve`."""

    queries: list[Query] = Field(min_length=1, max_length=MAX_QUERIES)
    topk: int | None = Field(
        default=None, ge=1, le=MAX_TOPK, description=f"passages a query ({DEFAULT_TOPK} if not given)"
    )
    return_scores: bool = False


class RetrieveResponse(BaseModel):
    """Answer of `POST /retrieve`: one list a query, best first."""

    result: list[list[Passage | ScoredPassage]]


class Metrics:
    """Prometheus metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("retrieval_requests", "Requests to /retrieve", registry=self.registry)
        self.queries = Counter("retrieval_queries", "Queries in accepted requests", registry=self.registry)
        self.errors = Counter(
            "retrieval_errors", "Failed requests by status", ["status"], registry=self.registry
        )
        self.encode = Histogram(
            "retrieval_encode_seconds", "Embedding time of a batch", registry=self.registry
        )
        self.index = Histogram("retrieval_index_seconds", "Index time of a batch", registry=self.registry)


class Retrieval:
    """Answers queries through a batcher, within a deadline in seconds; failures are HTTP errors."""

    def __init__(self, store: Store, embedder: Embedder, metrics: Metrics, deadline_s: float) -> None:
        self.store = store
        self.embedder = embedder
        self.metrics = metrics
        self.deadline_s = deadline_s
        self.batcher = Batcher(self._answer)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        """Return the hits of each query; raises HTTPException 503 past the deadline, 500 for a failure."""
        try:
            answer = asyncio.wrap_future(self.batcher.submit(queries, topk))
            return await asyncio.wait_for(answer, self.deadline_s)
        except TimeoutError:
            reason = f"no answer within {self.deadline_s:g} s: the server is overloaded or its index hangs"
            raise HTTPException(503, reason) from None
        except Exception as error:  # embedder or index failed: every request of the batch hears why
            raise HTTPException(500, f"retrieval failed: {type(error).__name__}: {error}") from error

    def _answer(self, queries: list[str], topk: int) -> list[list[ScoredPassage]]:
        with self.metrics.encode.time():
            embeddings = self.embedder.encode_queries(queries)
        with self.metrics.index.time():
            return self.store.query(embeddings, topk)


def create_app(store: Store, embedder: Embedder, deadline_s: float = DEADLINE_S) -> FastAPI:
    """Return the app that answers from `store`; `deadline_s` bounds a request (seconds)."""
    metrics = Metrics()
    retrieval = Retrieval(store, embedder, metrics, deadline_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(retrieval.batcher.close)

    app = FastAPI(title="Dr. Zero retrieval", lifespan=lifespan)
    app.middleware("http")(_counting(metrics))
    app.exception_handler(RequestValidationError)(_explain)

    @app.post("/retrieve", response_model=RetrieveResponse)
    async def retrieve(request: RetrieveRequest) -> Response:
        """Return the nearest passages of each query."""
        metrics.queries.inc(len(request.queries))
        found = await retrieval.search(request.queries, request.topk or DEFAULT_TOPK)
        # A response is returned as it is: validating our own passages against the model would only take time.
        if request.return_scores:
            return JSONResponse({"result": found})
        return JSONResponse({"result": [[hit["document"] for hit in hits] for hits in found]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Answer 200 when a canary query has just been answered, else the error that queries get."""
        await retrieval.search([CANARY], 1)
        return {"status": "ok", "collection": store.collection.name, **store.info.to_metadata()}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Return the metrics as Prometheus text."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _counting(
    metrics: Metrics,
) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        if request.url.path == "/retrieve":
            metrics.requests.inc()
            if response.status_code >= 400:
                metrics.errors.labels(str(response.status_code)).inc()
        return response

    return count


async def _explain(_: Request, error: Exception) -> JSONResponse:
    """Say in one line what is wrong; FastAPI's own answer repeats the input, however huge."""
    assert isinstance(error, RequestValidationError)
    problems = (
        f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in error.errors()[:3]
    )
    return JSONResponse({"detail": "; ".join(problems).encode(errors="replace").decode()}, status_code=422)


def _bind(host: str, port: int) -> socket.socket:
    """Bind without listening: until the server is ready, connections are refused rather than left hanging."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StoreError(
            f"cannot listen on {host} port {port} ({error.strerror}): "
            "stop what uses it, or choose another with --port"
        ) from error
    return listener


def _serve(args: argparse.Namespace) -> None:
    listener = _bind(args.host, args.port)
    with listener, open_collection(args.chroma_path, args.collection) as store:
        embedder = Embedder(EmbedderSpec(args.embedder or store.info.embedder, args.device))
        store.check_embedder(embedder)
        _set_threads(args.threads)
        app = create_app(store, embedder)
        print(
            f"serving {store.info.documents} documents of {args.collection!r} with {embedder.name}",
            flush=True,
        )
        uvicorn.Server(uvicorn.Config(app, log_level="info", access_log=False)).run(sockets=[listener])


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m search.server", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--chroma-path", type=Path, required=True, help="Chroma folder, as built by search.index"
    )
    parser.add_argument("--collection", required=True, help="collection to serve")
    parser.add_argument("--embedder", help="hub id or folder (default: the one that built the collection)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--device", help="torch device (default: CUDA where there is one)")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads on a CPU (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    setproctitle("drzero: retrieval")
    try:
        _serve(args)
    except (StoreError, EmbedderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
