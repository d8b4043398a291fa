"""A proxy on loopback in front of the model. It records every call of an agent, except headers.

    with Recorder("http://127.0.0.1:8080/v1") as recorder:
        await agent.run(item, base_url=recorder.url(run=3), api_key=key)    # /run/3/v1
        calls = recorder.take(3)

Its thread is its own, so an agent that blocks its event loop delays no answer.
"""

import asyncio
import json
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from drzero.ops.connections import Connection
from drzero.ops.disconnect import unless_gone
from drzero.ops.text import is_loopback

_OF_ONE_HOP = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_BACKLOG = 4096


@dataclass
class ModelCall:
    """One request to the model, and its answer."""

    run: int | None
    path: str
    started: float
    request: Any = None  # a JSON value, else text
    ended: float | None = None  # None in flight
    status: int | None = None  # None if the client left or the server did not answer
    answer: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None  # by the server's count, if any
    port: int = 0  # the client's, which identifies the connection
    unwanted: bool = False

    def forget(self) -> None:
        """Drop its text now, or when it ends: the client may see the end before the proxy does."""
        self.unwanted = True
        if self.ended is not None:
            self.request, self.answer = None, ""

    @property
    def seconds(self) -> float:
        """From the request to the end of its answer."""
        return (self.ended or time.perf_counter()) - self.started


@dataclass
class CallTotals:
    """Of all ended calls."""

    calls: int = 0
    failed: int = 0  # not with status 200
    without_usage: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    most_in_flight: int = 0
    run_of_port: dict[int, int] = field(default_factory=dict)  # the last run over each client port


class Recorder:
    """Records calls while it is open. Calls `on_call` in its thread with each ended one."""

    def __init__(self, base_url: str, on_call: Callable[[ModelCall], None] = lambda call: None) -> None:
        parts = urlsplit(base_url)
        self._upstream, self._path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
        self._trust_env, self._on_call = not is_loopback(base_url), on_call
        self._calls: defaultdict[int | None, list[ModelCall]] = defaultdict(list)
        self._in_flight = 0
        self._serves = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._client: httpx.AsyncClient
        self.totals = CallTotals()

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            self._app(),
            log_level="critical",
            http=Connection,
            ws="none",
            backlog=_BACKLOG,
            # Keep an agent's open connections open, to report them.
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="recorder", daemon=True
        )
        self._thread.start()
        self._serves.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)

    def url(self, run: int | None = None) -> str:
        """A run's base address. Calls to the plain one (from the environment) belong to no run."""
        of_run = "" if run is None else f"/run/{run}"
        return f"http://127.0.0.1:{self.port}{of_run}{self._path}"

    def take(self, run: int | None) -> list[ModelCall]:
        """Hand over the calls of a run so far."""
        return self._calls.pop(run, [])

    def release(self) -> None:
        """Close the proxy's idle connections to the model. Call it from another thread."""
        asyncio.run_coroutine_threadsafe(self._renew(), self._loop).result()

    async def _renew(self) -> None:
        old = self._client
        self._client = self._new_client()
        await old.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._upstream,
            # No read timeout: the run's deadline bounds a call.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=self._trust_env,
        )

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self._loop, self._client = asyncio.get_running_loop(), self._new_client()
            self._serves.set()
            yield
            await self._client.aclose()

        app = FastAPI(openapi_url=None, lifespan=lifespan)

        async def of_run(request: Request, run: int, path: str) -> Response:
            return await self._pass_on(request, run, f"/{path}")

        async def of_none(request: Request, path: str) -> Response:
            return await self._pass_on(request, None, f"/{path}")

        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        app.add_api_route("/run/{run}/{path:path}", of_run, methods=methods)
        app.add_api_route("/{path:path}", of_none, methods=methods)
        return app

    async def _pass_on(self, request: Request, run: int | None, path: str) -> Response:
        call = ModelCall(run, path, time.perf_counter())
        call.port = request.client.port if request.client else 0
        self._begin(call)
        try:
            body = await request.body()
            call.request = readable(body)
            # Uncompressed, to be readable in the record.
            dropped = {*_OF_ONE_HOP, "accept-encoding"}
            headers = [(name, value) for name, value in request.headers.items() if name not in dropped]
            client = self._client
            sent = client.build_request(
                request.method,
                httpx.URL(path, query=request.url.query.encode()),
                headers=[*headers, ("accept-encoding", "identity")],
                content=body,
            )
            answer = await unless_gone(request.receive, client.send(sent, stream=True))
        except httpx.TransportError as error:
            self._end(call, 502, f"{type(error).__name__}: {error}")
            message = f"{self._upstream} did not answer: {type(error).__name__} {error}".rstrip()
            return JSONResponse({"error": {"message": message, "type": "server_error"}}, status_code=502)
        except BaseException:
            self._end(call, None, "")
            raise
        if answer is None:
            self._end(call, None, "")
            return Response(status_code=499)
        kept = {name: value for name, value in answer.headers.items() if name not in _OF_ONE_HOP}
        return StreamingResponse(self._parts(call, answer), answer.status_code, kept)

    async def _parts(self, call: ModelCall, answer: httpx.Response) -> AsyncIterator[bytes]:
        content, whole = bytearray(), False
        try:
            async for part in answer.aiter_raw():
                content += part
                yield part
            whole = True
        finally:
            self._end(call, answer.status_code if whole else None, content.decode(errors="replace"))
            await answer.aclose()

    def _begin(self, call: ModelCall) -> None:
        self._calls[call.run].append(call)
        if call.run is not None:
            self.totals.run_of_port[call.port] = call.run
        self._in_flight += 1
        self.totals.most_in_flight = max(self.totals.most_in_flight, self._in_flight)

    def _end(self, call: ModelCall, status: int | None, answer: str) -> None:
        call.status, call.answer = status, answer
        self._in_flight -= 1
        totals = self.totals
        totals.calls += 1
        totals.failed += status != 200
        usage = _usage(answer) if status == 200 else {}
        call.tokens_in = usage.get("prompt_tokens", usage.get("input_tokens"))
        call.tokens_out = usage.get("completion_tokens", usage.get("output_tokens"))
        totals.tokens_in += call.tokens_in or 0
        totals.tokens_out += call.tokens_out or 0
        totals.without_usage += status == 200 and call.tokens_out is None
        self._on_call(call)
        call.ended = time.perf_counter()
        if call.unwanted:
            call.forget()


def readable(body: bytes) -> Any:
    """A JSON body's value, else its text."""
    with suppress(ValueError, RecursionError):
        return json.loads(body)
    return body.decode(errors="replace")


def _usage(answer: str) -> dict[str, int]:
    """The usage an answer reports, whole or streamed. Anthropic's streams report it in two events."""
    ended = re.split(r"\r\n|\r|\n", answer)  # as the event stream's standard has it
    lines = [line.removeprefix("data:").strip() for line in ended if line.startswith("data:")]
    told: dict[str, int] = {}
    for text in lines or [answer]:
        if '"usage"' not in text:  # most of a stream's hundreds of events
            continue
        found = readable(text.encode())
        places = [found, *map(found.get, ("message", "response"))] if isinstance(found, dict) else []
        for place in places:
            if isinstance(place, dict) and isinstance(usage := place.get("usage"), dict):
                told |= {name: count for name, count in usage.items() if isinstance(count, int)}
    return told
