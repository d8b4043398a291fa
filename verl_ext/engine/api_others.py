"""The reference server's answers to other APIs than OpenAI's chat: the same turn in other words.

add_other_apis(app, job_of, chat, "policy")     # POST /v1/responses and /v1/messages
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from drzero.ops.disconnect import unless_gone
from drzero.ops.openai_http import GONE, RequestRefused
from verl_ext.apis import messages, responses
from verl_ext.apis.turn import Asked, streamed
from verl_ext.engine.api_answers import Job
from verl_ext.engine.api_requests import ChatRequest


def add_other_apis(
    app: FastAPI,
    job_of: Callable[[Request, Callable[[bytes], Job]], Awaitable[Job]],
    chat: Callable[[ChatRequest], Job],
    model: str,
) -> None:
    """Add their routes. `job_of` reads a request, and `chat` makes the job of its chat."""

    async def answer(request: Request, api: ModuleType) -> Response:
        bodies: list[Any] = []

        def job(content: bytes) -> Job:
            asked, body = api.read(content)
            bodies.append(body)
            return chat(_as_chat(asked, body.model))

        try:
            turn = (await job_of(request, job)).turn()
            (body,) = bodies
            if body.stream:
                events = streamed(turn, api, model, body)
                first = await anext(events)  # until something is sent, a refusal has its own status
                return StreamingResponse(_following(first, events), media_type="text/event-stream")
            told = await unless_gone(request.receive, turn)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except RequestRefused as refused:
            return JSONResponse(api.refused(refused), status_code=refused.status)
        return Response(status_code=GONE) if told is None else JSONResponse(api.whole(told, model, body))

    @app.post("/v1/responses")
    async def of_responses(request: Request) -> Response:
        return await answer(request, responses)

    @app.post("/v1/messages")
    async def of_messages(request: Request) -> Response:
        return await answer(request, messages)


def _as_chat(asked: Asked, model: str | None) -> ChatRequest:
    chat = {"messages": asked.messages, "tools": asked.tools, "max_tokens": asked.max_tokens}
    return ChatRequest.model_validate_json(json.dumps({**chat, "model": model, **asked.sampling}))


async def _following(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event
