"""A model's turn, whichever API asks for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from drzero.ops.openai_http import RequestRefused
from environments.call import Call, ToolSchema
from environments.conversation import Message

_KEEP_ALIVE_S = 15.0  # proxies and clients give up on a silent stream


@dataclass(frozen=True)
class Asked:
    """A request for the next turn."""

    messages: tuple[Message, ...]  # as chat templates take them
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature` and `top_p` as asked. In training the run sets them."""


@dataclass(frozen=True)
class Answer:
    """The turn, as the client hears it."""

    id: str
    text: str | None  # None for tool calls alone
    calls: tuple[Call, ...]
    tokens_in: int
    ids: list[int]  # as sampled
    truncated: bool  # cut off by the token limit


def sampling(request: Any) -> dict[str, Any]:
    """The fields of a request that say how to sample."""
    asked = {name: getattr(request, name) for name in ("temperature", "top_p")}
    return {name: value for name, value in asked.items() if value is not None}


async def streamed(
    asking: Awaitable[Answer], api: ModuleType, model: str, request: Any
) -> AsyncGenerator[bytes]:
    """An answer's events, with signs of life before it. Only a refusal that comes first is raised."""
    task, quiet = asyncio.ensure_future(asking), True
    try:
        while not (await asyncio.wait({task}, timeout=_KEEP_ALIVE_S))[0]:
            quiet = False
            yield api.SILENCE.encode()
        try:
            told = api.events(await task, model, request)
        except RequestRefused as refused:
            if quiet:
                raise
            told = iter([api.failed(refused)])
        for event in told:
            yield event.encode()
    finally:
        task.cancel()
