"""The model's endpoint for the library's train client, which sends token ids and its trace's secret id."""

from collections.abc import Iterable

from aiohttp import web
from verifiers.v1.clients.client import SESSION_ID_HEADER

from drzero.ops.openai_http import RequestRefused
from drzero.players.loop_server import LoopServer
from drzero.players.verifiers.session import Session, generate_response
from verl_ext.episodes import Sampled


class Endpoint(LoopServer):
    """The sessions of one event loop's episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Session] = {}  # by trace id, filled by the library's thread

    def routes(self) -> Iterable[web.RouteDef]:
        """What the library's client asks."""
        return [web.post("/inference/v1/generate", self._generate), web.get("/v1/models", self._models)]

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(generate_response(await self._sampled(request)))
        except RequestRefused as refused:  # as a client error, so that it is not retried
            return web.json_response(refused.body(), status=refused.status)

    async def _sampled(self, request: web.Request) -> Sampled:
        """Raises RequestRefused."""
        session = self.sessions.get(request.headers.get(SESSION_ID_HEADER, ""))
        if session is None:
            raise RequestRefused("no episode of this id is being played", status=404)
        try:
            ids = [int(token) for token in (await request.json())["token_ids"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefused(f"token_ids are needed, a list of numbers: {error}") from error
        return await session.sample(ids)

    async def _models(self, _: web.Request) -> web.Response:
        """The client asks for the context length. Sessions have their own limits."""
        return web.json_response({"object": "list", "data": []})
