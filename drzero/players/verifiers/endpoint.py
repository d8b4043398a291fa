"""The model's endpoint for the library's train client, which sends token ids and its trace's secret id."""

import json
from collections.abc import Iterable

from aiohttp import web
from verifiers.v1.clients.client import SESSION_ID_HEADER

from drzero.players.loop_server import LoopServer
from drzero.players.verifiers.session import Session, TurnRefused, generate_response


class Endpoint(LoopServer):
    """The sessions of one event loop's episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Session] = {}  # by trace id, filled by the library's thread

    def routes(self) -> Iterable[web.RouteDef]:
        """What the library's client asks."""
        return [web.post("/inference/v1/generate", self._generate), web.get("/v1/models", self._models)]

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


def _refusal(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
