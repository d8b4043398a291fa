"""Anthropic's messages: `read` a request, then the answer `whole` or as `events`."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drzero.ops.openai_http import RequestRefused, only
from environments.call import ToolSchema
from verl_ext.apis.turn import Answer, Asked, sampling

SILENCE = 'event: ping\ndata: {"type": "ping"}\n\n'


class _Block(BaseModel):
    """A text, a tool's use, or its result. Other fields, such as cache_control, say nothing to the model."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[_Block]" = ""


class _Said(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {"type": "object", "properties": {}}
    type: Annotated[Any, only(None, "custom")] = None  # others are run by the vendor's server

    def shown(self) -> ToolSchema:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class _Choice(BaseModel):
    type: Annotated[Any, only("auto", "none")]


class MessagesRequest(BaseModel):
    """`POST /v1/messages`. Fields that say nothing to the model are not read."""

    model_config = ConfigDict(extra="ignore")
    messages: Annotated[list[_Said], Field(min_length=1)]
    max_tokens: int | None = None  # absent in a count of tokens
    system: str | list[_Block] = ""
    tools: list[_Tool] = []
    tool_choice: _Choice | None = None
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    model: str | None = None
    stream: bool = False


def read(content: bytes) -> tuple[Asked, MessagesRequest]:
    """Raises ValidationError or RequestRefused."""
    request = MessagesRequest.model_validate_json(content)
    if request.stop_sequences:
        raise RequestRefused("stop_sequences: a turn ends where the model ends it")
    if request.messages[-1].role == "assistant":
        raise RequestRefused("messages: the last is the assistant's, and no turn is continued here")
    system = _text(request.system)
    messages = [{"role": "system", "content": system}] if system else []
    for said in request.messages:
        messages += _plain(said)
    hides = request.tool_choice is not None and request.tool_choice.type == "none"
    tools = tuple(tool.shown() for tool in request.tools if not hides)
    return Asked(tuple(messages), tools, request.max_tokens, sampling(request)), request


def whole(answer: Answer, model: str, request: MessagesRequest) -> dict[str, Any]:
    """The answer's body."""
    body = _head(answer, model) | {"content": _blocks(answer), "stop_reason": _reason(answer)}
    return body | {"usage": _usage(answer, len(answer.ids))}


def events(answer: Answer, model: str, request: MessagesRequest) -> Iterator[str]:
    """The answer as a stream: each block begins, has one delta of the same kind, and stops."""
    yield event("message_start", message=_head(answer, model) | {"content": [], "usage": _usage(answer, 0)})
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty: dict[str, Any] = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield event("content_block_start", index=index, content_block=block | empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {"stop_reason": _reason(answer), "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": len(answer.ids)})
    yield event("message_stop")


def refused(refusal: RequestRefused) -> dict[str, Any]:
    """A refusal's body."""
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def failed(refusal: RequestRefused) -> str:
    """The last event of a stream that cannot go on."""
    return event("error", **refused(refusal))


def _plain(said: _Said) -> Iterator[dict[str, Any]]:
    blocks = [_Block(type="text", text=said.content)] if isinstance(said.content, str) else said.content
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
    text, used = _text(blocks), [block for block in blocks if block.type == "tool_use"]
    if used:
        yield {"role": said.role, "content": text, "tool_calls": [_as_call(block) for block in used]}
    elif text or not results:
        yield {"role": said.role, "content": text}


def _as_call(block: _Block) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _text(content: str | Sequence[_Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if block.type == "text")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    return said + [
        {
            "type": "tool_use",
            "id": f"toolu_{answer.id}_{n}",
            "name": one.name,
            "input": dict(one.arguments or {}),
        }
        for n, one in enumerate(answer.calls)
    ]


def _reason(answer: Answer) -> str:
    if answer.truncated:
        return "max_tokens"
    return "tool_use" if answer.calls else "end_turn"


def _head(answer: Answer, model: str) -> dict[str, Any]:
    head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": model}
    return head | {"stop_reason": None, "stop_sequence": None}


def _usage(answer: Answer, tokens_out: int) -> dict[str, int]:
    return {"input_tokens": answer.tokens_in, "output_tokens": tokens_out}


def event(kind: str, **fields: Any) -> str:
    """A server-sent event with its kind in both places."""
    return f"event: {kind}\ndata: {json.dumps({**fields, 'type': kind}, ensure_ascii=False)}\n\n"
