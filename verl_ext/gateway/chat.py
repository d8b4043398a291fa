"""OpenAI's chat completions: `read` a request, then the answer `whole` or as `events`."""

import time
from collections.abc import Iterator
from typing import Any

from drzero.ops.openai_http import sse
from verl_ext.engine.api_answers import tool_call
from verl_ext.engine.api_requests import ChatRequest
from verl_ext.gateway.session import Asked, CallRefused, ModelCall
from verl_ext.method.chat import plain_message


def read(content: bytes) -> tuple[Asked, ChatRequest]:
    """Raises ValidationError, ValueError or CallRefused."""
    request = ChatRequest.model_validate_json(content)
    if request.n != 1:
        raise CallRefused("n: an agent in training gets one answer a call; call again for another")
    if request.stop_strings:
        raise CallRefused("stop: a turn ends where the model ends it")
    messages = tuple(plain_message(message.for_prompt()) for message in request.messages)
    limits = request.max_completion_tokens, request.max_tokens
    most = next((limit for limit in limits if limit is not None), None)
    return Asked(messages, tuple(request.shown_tools), most), request


def whole(call: ModelCall, model: str, request: ChatRequest) -> dict[str, Any]:
    """The answer's body, with the sampled ids on request."""
    message: dict[str, Any] = {"role": "assistant", "content": call.text, "refusal": None}
    if call.calls:
        message["tool_calls"] = [tool_call(one) for one in call.calls]
    choice = {"index": 0, "message": message, "finish_reason": _reason(call), "logprobs": None}
    if request.return_token_ids:
        choice["token_ids"] = call.sampled.ids
    return _head("chat.completion", call, model) | {"choices": [choice], "usage": usage(call)}


def events(call: ModelCall, model: str, request: ChatRequest) -> Iterator[str]:
    """The answer as a stream: a role, the text, the calls, the reason, the usage."""
    head = _head("chat.completion.chunk", call, model)

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **more}
        return sse(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if call.text:
        yield chunk({"content": call.text})
    if call.calls:
        yield chunk({"tool_calls": [{"index": n, **tool_call(one)} for n, one in enumerate(call.calls)]})
    ids = {"token_ids": call.sampled.ids} if request.return_token_ids else {}
    yield chunk({}, _reason(call), **ids)
    if request.stream_options.include_usage:
        yield sse(head | {"choices": [], "usage": usage(call)})
    yield "data: [DONE]\n\n"


def usage(call: ModelCall) -> dict[str, int]:
    """The tokens of a call, in OpenAI's words."""
    tokens_in, tokens_out = len(call.prompt_ids), len(call.sampled.ids)
    return {
        "prompt_tokens": tokens_in,
        "completion_tokens": tokens_out,
        "total_tokens": tokens_in + tokens_out,
    }


def _reason(call: ModelCall) -> str:
    if call.sampled.truncated:
        return "length"
    return "tool_calls" if call.calls else "stop"


def _head(kind: str, call: ModelCall, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.number}", "object": kind, "created": int(time.time()), "model": model}
