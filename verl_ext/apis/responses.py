"""OpenAI's responses: `read` a request, then the answer `whole` or as `events`. It keeps no state."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from drzero.ops.openai_http import RequestRefused, only, sse
from verl_ext.apis.turn import Answer, Asked, sampling

SILENCE = ": still at it\n\n"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_NO_STATE = "it keeps no state: send the whole conversation as input"


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`. Fields that say nothing to the model are not read."""

    model_config = ConfigDict(extra="ignore")
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, only(None, "auto", "none")] = None
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    model: str | None = None
    stream: bool | None = None


def read(content: bytes) -> tuple[Asked, ResponsesRequest]:
    """Raises ValidationError or RequestRefused."""
    request = ResponsesRequest.model_validate_json(content)
    if request.previous_response_id or request.conversation or request.background:
        raise RequestRefused(f"previous_response_id, conversation, background: {_NO_STATE}")
    if (form := ((request.text or {}).get("format") or {}).get("type", "text")) != "text":
        raise RequestRefused(f"text.format: answers are text, and nothing holds them to {form!r}")
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for item in items:
        _add(messages, item)
    tools = [] if request.tool_choice == "none" else [_tool(tool) for tool in request.tools or ()]
    return Asked(tuple(messages), tuple(tools), request.max_output_tokens, sampling(request)), request


def whole(answer: Answer, model: str, request: ResponsesRequest) -> dict[str, Any]:
    """The answer's body."""
    tokens_in, tokens_out = answer.tokens_in, len(answer.ids)
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": tokens_in, "output_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}
    cut = {"reason": "max_output_tokens"} if answer.truncated else None
    ended = {"status": "incomplete" if cut else "completed", "incomplete_details": cut}
    return _head(answer, model, request) | ended | {"output": _items(answer), "usage": usage | details}


def events(answer: Answer, model: str, request: ResponsesRequest) -> Iterator[str]:
    """The answer as a stream: each item is added, told and done."""
    done = whole(answer, model, request)
    begun = _head(answer, model, request) | {"status": "in_progress", "output": []}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(done["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        told.append(("response.output_item.added", {"output_index": index, "item": _emptied(item)}))
        told += _told(item, at)
        told.append(("response.output_item.done", {"output_index": index, "item": item}))
    told.append((f"response.{done['status']}", {"response": done}))
    for number, (kind, fields) in enumerate(told):
        data = json.dumps({"type": kind, "sequence_number": number, **fields}, ensure_ascii=False)
        yield f"event: {kind}\ndata: {data}\n\n"


def refused(refusal: RequestRefused) -> dict[str, Any]:
    """A refusal's body."""
    return refusal.body()


def failed(refusal: RequestRefused) -> str:
    """The last event of a stream that cannot go on."""
    return sse(refusal.body())


def _told(item: dict[str, Any], at: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        written = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**at, **written}
        return
    at, (part,) = {**at, "content_index": 0}, item["content"]
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return item | {"status": "in_progress"} | nothing


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item as a chat's message. Calls of one turn are one message, with its text."""
    kind = item.get("type", "message")
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise RequestRefused(f"input: a message's role is one of {', '.join(_ROLES)}")
        messages.append({"role": role, "content": _text(item.get("content") or "")})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item["name"], "arguments": json.loads(item["arguments"] or "{}")}
        made = {"id": item["call_id"], "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        told = {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
        messages.append(told)
    elif kind != "reasoning":
        raise RequestRefused(f"input: an item of the type {kind!r} is not read here")


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise RequestRefused(
                f"input: content of the type {part.get('type')!r} is not read here: text only"
            )
    return "\n".join(part["text"] for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestRefused(f"tools: a tool of the type {tool.get('type')!r} is not served here")
    shown = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": shown}


def _items(answer: Answer) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text or "", "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
        said.append(message | {"status": "completed"})
    for n, one in enumerate(answer.calls):
        name = f"{answer.id}_{n}"
        made = {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}", "name": one.name}
        said.append(
            made | {"arguments": json.dumps(one.arguments, ensure_ascii=False), "status": "completed"}
        )
    return said


def _head(answer: Answer, model: str, request: ResponsesRequest) -> dict[str, Any]:
    head = {"id": f"resp_{answer.id}", "object": "response", "created_at": int(time.time()), "model": model}
    asked = {"tools": request.tools or [], "tool_choice": request.tool_choice or "auto"}
    return head | asked | {"parallel_tool_calls": True, "error": None, "instructions": request.instructions}
