"""The model's server for agents: three APIs on 127.0.0.1, an address and a key for each episode."""

import hmac
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from types import ModuleType
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from drzero.ops.openai_http import RequestRefused, refusal
from drzero.players.gateway import chat
from drzero.players.gateway.session import AgentSession
from drzero.players.loop_server import LoopServer
from environments.agent.contract import Endpoint
from verl_ext.apis import messages, responses
from verl_ext.apis.turn import Asked, streamed

MODEL = "policy"


class Gateway(LoopServer):
    """The sessions of one event loop's episodes."""

    cancels = True

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[str, tuple[AgentSession, str]] = {}

    def open(self, session: AgentSession) -> Endpoint:
        """A new address for this episode."""
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self._sessions[name] = (session, key)
        return Endpoint(f"{self.url}/{name}/v1", key, MODEL)

    def close(self, endpoint: Endpoint) -> None:
        """Answer no more at this address."""
        session, _ = self._sessions.pop(endpoint.base_url.split("/")[-2])
        session.closed = True

    def routes(self) -> Iterable[web.RouteDef]:
        """Three APIs below each session's address."""
        for path, api in (("chat/completions", chat), ("responses", responses), ("messages", messages)):
            yield web.post(f"/{{session}}/v1/{path}", self._answering(api))
        yield web.post("/{session}/v1/messages/count_tokens", self._count)
        yield web.get("/{session}/v1/models", self._models)

    def _answering(self, api: ModuleType) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                asked, body = _read(api, await request.read())
                if body.stream:
                    return await _stream(request, streamed(session.ask(asked), api, MODEL, body))
                return web.json_response(api.whole(await session.ask(asked), MODEL, body))
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


async def _stream(request: web.Request, events: AsyncGenerator[bytes]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with aclosing(events):
        async for event in events:
            if not stream.prepared:  # until something is sent, a refusal has its own status
                await stream.prepare(request)
            await stream.write(event)
    await stream.write_eof()
    return stream
