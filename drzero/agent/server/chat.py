"""OpenAI's chat completions, whole or streamed, and its list of models.

Each side of the desk is a model. Searches appear as `reasoning_content` while they happen, sources as
`annotations`. A front end's own tasks (titles, tags) are answered by the model without a search.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from drzero.agent.answer import Answer, Source
from drzero.agent.server.chat_request import ChatRequest, too_long
from drzero.agent.server.chat_text import composed, thought
from drzero.agent.server.desk import Desk
from drzero.agent.server.events import EventStream, Tell
from drzero.agent.server.faults import NOT_AGAIN, logged
from drzero.agent.server.sources import Sources
from drzero.ops.console import say
from drzero.ops.disconnect import unless_gone
from drzero.ops.openai_http import GONE, RequestRefused, read_body, sse, unknown_model, usage
from environments.turn_text import after_thinking
from verl_ext.method.prompts import Message

BODY_BYTES = 4 << 20

_DONE = "data: [DONE]\n\n"

Think = Callable[[str], None]


@dataclass(frozen=True)
class _Reply:
    text: str
    tokens_in: int
    tokens_out: int
    annotations: Sequence[dict[str, Any]] = ()
    finish_reason: Literal["stop", "length"] = "stop"

    @property
    def usage(self) -> dict[str, int]:
        return usage(self.tokens_in, self.tokens_out)


@dataclass
class Chat:
    """The routes, over a desk."""

    desk: Desk
    sources: Sources
    lists_sources: bool
    _began: int = field(default_factory=lambda: int(time.time()))
    _has_told: bool = False

    @property
    def routes(self) -> list[Route]:
        """For the app to mount."""
        return [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
        ]

    async def _complete(self, request: Request) -> Response:
        body = ChatRequest.model_validate_json(await read_body(request, BODY_BYTES))
        side = self._side(body.model)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())} | self._identity(side)
        if body.is_task:
            say("serve-agent", "a front end asks for a title or the like: answered without a search")
            reply = partial(self._said, body.plain(), body.max_completion_tokens or body.max_tokens, side)
        else:
            self._tell_of_system_prompt(body)
            reply = partial(self._answered, *body.question(), side, str(request.base_url))
        if body.stream:
            stream = _Stream(head, reply, body.stream_options.include_usage)
            return EventStream(stream.run, stream.failed)
        whole = await unless_gone(request.receive, _whole(head, reply))
        return Response(status_code=GONE) if whole is None else JSONResponse(whole)

    async def _answered(
        self, question: str, earlier: Sequence[tuple[str, str]], side: int, base: str, think: Think
    ) -> _Reply:
        def told(queries: Sequence[str], found: Sequence[Source] | None) -> None:
            think(thought(queries, found))

        answer = await self.desk.ask(question, earlier, told, side=side)
        self._check(answer, side)
        text, annotations = composed(
            answer, lambda source: self.sources.address(base, source), lists_sources=self.lists_sources
        )
        return _Reply(text, answer.attempt.tokens_in, answer.attempt.tokens_out, annotations)

    async def _said(self, messages: Sequence[Message], most: int | None, side: int, think: Think) -> _Reply:
        reply = await self.desk.say(messages, most, side=side)
        if reply is None:
            raise too_long()
        text = after_thinking(reply.text).strip()
        reason: Literal["stop", "length"] = "length" if reply.truncated else "stop"
        return _Reply(text, reply.tokens_in, reply.tokens_out, finish_reason=reason)

    def _check(self, answer: Answer, side: int) -> None:
        attempt = answer.attempt
        if answer.state == "failed":
            is_late = attempt.latency_s >= self.desk.askers[side].solver.deadline_s
            why = f"the question failed: {attempt.failure}"
            raise RequestRefused(why, status=504 if is_late else 503, headers=NOT_AGAIN)
        if not attempt.trajectory.turns:
            raise too_long()

    def _tell_of_system_prompt(self, body: ChatRequest) -> None:
        if body.has_system_prompt and not self._has_told:
            self._has_told = True
            say("serve-agent", "a client's system prompt is left out: the agent keeps its own")

    def _side(self, asked: str | None) -> int:
        names = self.desk.names
        if asked is not None and asked not in names:
            raise unknown_model(asked, " and ".join(map(repr, names)))
        return names.index(asked or names[0])

    def _identity(self, side: int) -> dict[str, str]:
        weights = sha256(self.desk.askers[side].model.identity.encode()).hexdigest()[:12]
        return {"model": self.desk.names[side], "system_fingerprint": f"{weights}-{self.desk.index}"}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._entry, range(len(self.desk.names)))]})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._entry(self._side(request.path_params["name"])))

    def _entry(self, side: int) -> dict[str, Any]:
        known = self._identity(side)
        entry = {"id": known.pop("model"), "object": "model", "created": self._began, "owned_by": "drzero"}
        return entry | known


Replying = Callable[[Think], Any]


async def _whole(head: dict[str, Any], replying: Replying) -> dict[str, Any]:
    thoughts: list[str] = []
    reply: _Reply = await replying(thoughts.append)
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if reply.annotations:
        message["annotations"] = reply.annotations
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    return head | {"object": "chat.completion", "choices": [choice], "usage": reply.usage}


@dataclass
class _Stream:
    head: dict[str, Any]
    replying: Replying
    wants_usage: bool
    _has_begun: bool = False

    async def run(self, tell: Tell) -> None:
        """Tell the chunks."""

        def say(**delta: Any) -> None:
            first = {} if self._has_begun else {"role": "assistant", "content": ""}
            for part in filter(None, (first, delta)):
                self._has_begun = True
                tell(self._part(part))

        reply: _Reply = await self.replying(lambda text: say(reasoning_content=text))
        say(content=reply.text)
        if reply.annotations:
            say(annotations=reply.annotations)
        tell(self._part({}, reply.finish_reason))
        if self.wants_usage:
            tell(self._chunk([], usage=reply.usage))
        tell(_DONE)

    def failed(self, error: Exception) -> str:
        """The end of a stream that fails."""
        return sse(logged(error, "a question").body()) + self._part({}, "stop") + _DONE

    def _part(self, delta: dict[str, Any], finish_reason: str | None = None) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return sse(self.head | {"object": "chat.completion.chunk", "choices": choices} | more)
