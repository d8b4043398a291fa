"""The model as the library's train client calls it: `POST /inference/v1/generate` on token ids, on 127.0.0.1.

One server for each event loop, thus for each rollout worker, on a port of the system's choice. Its requests
name the episode's trace, whose id nobody else knows; it takes ids and the ids alone: how a turn is sampled is
the run's.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from weakref import WeakKeyDictionary

from aiohttp import web
from verifiers.v1.clients.client import SESSION_ID_HEADER

from verl_ext.verifiers.session import Session, TurnRefused, generate_response

_LARGEST_REQUEST = 64 << 20
"""Bytes: a million ids are some 7 MB."""


class Endpoint:
    """The server of one event loop, and the sessions that it serves."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        """By the id of their trace; set from the library's thread, which a dict takes."""
        self.url = ""

    async def serving(self) -> AsyncGenerator[None]:
        """Serve until the generator is closed."""
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield
        finally:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        session = self.sessions.get(request.headers.get(SESSION_ID_HEADER, ""))
        if session is None:
            return _refusal("no episode of this id is being played", 404)
        try:
            body = await request.json()
            ids = [int(token) for token in body["token_ids"]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            return _refusal(f"token_ids are needed, a list of numbers: {error}", 400)
        try:
            return web.json_response(generate_response(await session.sample(ids)))
        except TurnRefused as refused:  # as an error of the request: it is not to be tried again
            return _refusal(str(refused), 400)

    async def _models(self, _: web.Request) -> web.Response:
        """The client asks for the engine's context length. The limits of an episode are the session's."""
        return web.json_response({"object": "list", "data": []})


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Endpoint, AsyncGenerator[None]]] = (
    WeakKeyDictionary()
)
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def endpoint() -> Endpoint:
    """The running loop's; started when first asked for, and closed with the loop's other generators."""
    loop = asyncio.get_running_loop()
    async with _STARTING.setdefault(loop, asyncio.Lock()):
        if loop not in _ENDPOINTS:
            server = Endpoint()
            serving = server.serving()
            await anext(serving)
            _ENDPOINTS[loop] = (server, serving)
    return _ENDPOINTS[loop][0]


def _refusal(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
