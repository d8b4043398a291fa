"""The model's endpoint for the library's train client, which sends token ids and its trace's secret id."""

import asyncio
import json
from collections.abc import AsyncGenerator
from weakref import WeakKeyDictionary

from aiohttp import web
from verifiers.v1.clients.client import SESSION_ID_HEADER

from verl_ext.verifiers.session import Session, TurnRefused, generate_response

_LARGEST_REQUEST = 64 << 20  # bytes. A million ids take about 7 MB


class Endpoint:
    """The server of one event loop, with its sessions."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}  # by trace id, filled by the library's thread
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
        except TurnRefused as refused:  # as a client error, so that it is not retried
            return _refusal(str(refused), 400)

    async def _models(self, _: web.Request) -> web.Response:
        """The client asks for the context length. Sessions have their own limits."""
        return web.json_response({"object": "list", "data": []})


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Endpoint, AsyncGenerator[None]]] = (
    WeakKeyDictionary()
)
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def endpoint() -> Endpoint:
    """The running loop's endpoint, started on first use and closed with the loop's generators."""
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
