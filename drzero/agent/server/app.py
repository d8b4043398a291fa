"""The service's web application: who may ask, its routes, and its health.

`states` has the health of each service that the agent needs.
"""

import hmac
from collections.abc import Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drzero.agent.server.chat import BODY_BYTES, Chat
from drzero.agent.server.desk import Desk
from drzero.agent.server.faults import EXPECTED, refused
from drzero.agent.server.mcp import Mcp
from drzero.agent.server.page import page_routes
from drzero.agent.server.sources import Sources
from drzero.ops.bearer import AGENT_KEY
from drzero.ops.openai_http import RequestRefused
from drzero.ops.text import is_loopback
from search.client import SearchClient

_WORKS = ("healthy", "busy")
_OPEN = ("/", "/health")
"""Paths without secrets. The page asks its user for the token."""


def create_app(
    desk: Desk,
    search: SearchClient,
    *,
    token: str | None,
    states: Callable[[], Mapping[str, str]],
    lists_sources: bool,
) -> ASGIApp:
    """The application over a desk in the running event loop."""

    async def health(request: Request) -> Response:
        found = states()
        works = all(state in _WORKS for state in found.values())
        return JSONResponse({"status": "ok" if works else "unavailable", **found}, 200 if works else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(desk.figures.registry), media_type=CONTENT_TYPE_LATEST)

    async def refuse(request: Request, error: Exception) -> Response:
        return refused(error).response()

    sources, mcp = Sources(search, token), Mcp(desk, search)
    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        *page_routes(desk),
        *sources.routes,
        *mcp.routes,
        *Chat(desk, sources, lists_sources).routes,
    ]
    handlers = dict.fromkeys((*EXPECTED, Exception), refuse)
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=mcp.lifespan)
    return Guard(app, token, sources)


class Guard:
    """Refuses who may not ask, before the body is read, and bodies that are too long.

    Without a token, a page of another site must not reach the documents through its visitor's browser.
    """

    def __init__(self, app: ASGIApp, token: str | None, sources: Sources) -> None:
        self._app, self._sources = app, sources
        self._credentials = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check(Request(scope))
        except RequestRefused as refusal:
            return await refusal.response()(scope, receive, send)
        left = BODY_BYTES

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_long()
            return message

        await self._app(scope, bounded, send)

    def _check(self, request: Request) -> None:
        headers = request.headers
        if self._credentials is None:
            host, origin = headers.get("host", ""), headers.get("origin")
            if not is_loopback(host) or (origin and origin.partition("://")[2] != host):
                raise RequestRefused(
                    f"without {AGENT_KEY} this server answers its own machine's names and its own page alone",
                    status=403,
                )
        elif not self._is_let_in(request, headers.get("authorization", "").encode("latin-1")):
            raise RequestRefused(
                f"a bearer token is needed: the one in the server's {AGENT_KEY}",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        if int(headers.get("content-length", 0)) > BODY_BYTES:
            raise _too_long()

    def _is_let_in(self, request: Request, sent: bytes) -> bool:
        path = request.scope["path"]  # as its route reads it; the URL's is quoted
        if hmac.compare_digest(sent, self._credentials or b"") or path in _OPEN:
            return True
        folder, _, key = path[1:].partition("/")
        return folder == "sources" and self._sources.opens(key, request.query_params.get("key", ""))


def _too_long() -> RequestRefused:
    return RequestRefused(f"the body is longer than {BODY_BYTES} bytes", status=413)
