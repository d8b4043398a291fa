"""The model's server for agents: three APIs on 127.0.0.1, an address and a key for each episode."""

import asyncio
import hmac
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web
from pydantic import ValidationError

from drzero.ops.openai_http import RequestRefused, refusal
from environments.agent.contract import Endpoint
from verl_ext.apis import messages, responses
from verl_ext.apis.turn import Answer, Asked, streamed
from verl_ext.gateway import chat
from verl_ext.gateway.session import AgentSession

MODEL = "policy"
_LARGEST_REQUEST = 64 << 20  # bytes


class Gateway:
    """The server of one event loop, with the sessions of its episodes."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[AgentSession, str]] = {}
        self._url = ""

    def open(self, session: AgentSession) -> Endpoint:
        """A new address for this episode."""
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self._sessions[name] = (session, key)
        return Endpoint(f"{self._url}/{name}/v1", key, MODEL)

    def close(self, endpoint: Endpoint) -> None:
        """Answer no more at this address."""
        session, _ = self._sessions.pop(endpoint.base_url.split("/")[-2])
        session.closed = True

    async def serving(self) -> AsyncGenerator[None]:
        """Serve until the generator is closed."""
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        for path, api in (("chat/completions", chat), ("responses", responses), ("messages", messages)):
            app.router.add_post(f"/{{session}}/v1/{path}", self._answering(api))
        app.router.add_post("/{session}/v1/messages/count_tokens", self._count)
        app.router.add_get("/{session}/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self._url = f"http://{host}:{port}"
            yield
        finally:
            _GATEWAYS.pop(asyncio.get_running_loop(), None)  # the generator holds the loop
            await runner.cleanup()

    def _answering(self, api: ModuleType) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                asked, body = _read(api, await request.read())
                if body.stream:
                    return await _stream(request, streamed(_told(session, asked), api, MODEL, body))
                return web.json_response(api.whole(await _told(session, asked), MODEL, body))
            except RequestRefused as refused:
                return web.json_response(api.refused(refused), status=refused.status)

        return answer

    def _session(self, request: web.Request) -> AgentSession:
        """Raises RequestRefused."""
        found = self._sessions.get(request.match_info["session"])
        if found is None:
            raise RequestRefused("no episode has this address: it has ended, or never began", status=410)
        session, key = found
        sent = request.headers.get("x-api-key") or request.headers.get("Authorization") or ""
        if not _same(sent, key):
            callers = (one for one, own in self._sessions.values() if _same(sent, own))
            if (caller := next(callers, None)) is not None:
                caller.fault = "it called the model of another episode with its own key"
            else:
                session.fault = "its model was called with the key of another episode"
            raise RequestRefused("this key is not of this episode: use endpoint.api_key", status=401)
        return session

    async def _count(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            asked, _ = _read(messages, await request.read())
            return web.json_response({"input_tokens": session.count(asked)})
        except RequestRefused as refused:
            return web.json_response(messages.refused(refused), status=refused.status)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "local"}
        return web.json_response({"object": "list", "data": [entry]})


def _read(api: ModuleType, content: bytes) -> tuple[Asked, Any]:
    """Raises RequestRefused."""
    try:
        asked, body = api.read(content)
    except ValidationError as error:
        raise refusal(error) from error
    # Of parts that have no model of their own, such as a response's items.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestRefused(f"the request is not one of this API: {error!r:.200}") from error
    return asked, body


def _same(sent: str, key: str) -> bool:
    # aiohttp reads bytes that are no text as lone surrogates.
    return hmac.compare_digest(sent.removeprefix("Bearer ").encode(errors="replace"), key.encode())


async def _told(session: AgentSession, asked: Asked) -> Answer:
    return (await session.ask(asked)).answer


async def _stream(request: web.Request, events: AsyncGenerator[bytes]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with aclosing(events):
        async for event in events:
            if not stream.prepared:  # until something is sent, a refusal has its own status
                await stream.prepare(request)
            await stream.write(event)
    await stream.write_eof()
    return stream


_GATEWAYS: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Gateway, AsyncGenerator[None]]] = (
    WeakKeyDictionary()
)
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def gateway() -> Gateway:
    """The running loop's gateway, started on first use and closed with the loop's generators."""
    loop = asyncio.get_running_loop()
    async with _STARTING.setdefault(loop, asyncio.Lock()):
        if loop not in _GATEWAYS:
            server = Gateway()
            serving = server.serving()
            await anext(serving)
            _GATEWAYS[loop] = (server, serving)
    return _GATEWAYS[loop][0]
