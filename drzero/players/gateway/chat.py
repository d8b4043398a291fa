"""OpenAI's chat completions: `read` a request, then the answer `whole` or as `events`."""

import time
from collections.abc import Iterator
from typing import Any

from drzero.ops.openai_http import RequestRefused, sse, usage
from verl_ext.apis import responses
from verl_ext.apis.turn import Answer, Asked, sampling
from verl_ext.engine.api_answers import tool_call
from verl_ext.engine.api_requests import ChatRequest
from verl_ext.method.chat import plain_message

SILENCE, refused, failed = responses.SILENCE, responses.refused, responses.failed


def read(content: bytes) -> tuple[Asked, ChatRequest]:
    """Raises ValidationError, ValueError or RequestRefused."""
    request = ChatRequest.model_validate_json(content)
    if request.n != 1:
        raise RequestRefused("n: an agent in training gets one answer a call; call again for another")
    if request.stop_strings:
        raise RequestRefused("stop: a turn ends where the model ends it")
    messages = tuple(plain_message(message.for_prompt()) for message in request.messages)
    return Asked(messages, tuple(request.shown_tools), request.most_tokens, sampling(request)), request


def whole(answer: Answer, model: str, request: ChatRequest) -> dict[str, Any]:
    """The answer's body, with the sampled ids on request."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [tool_call(one) for one in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": _reason(answer), "logprobs": None}
    if request.return_token_ids:
        choice["token_ids"] = answer.ids
    return _head("chat.completion", answer, model) | {
        "choices": [choice],
        "usage": usage(answer.tokens_in, len(answer.ids)),
    }


def events(answer: Answer, model: str, request: ChatRequest) -> Iterator[str]:
    """The answer as a stream: a role, the text, the calls, the reason, the usage."""
    head = _head("chat.completion.chunk", answer, model)

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **more}
        return sse(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.text:
        yield chunk({"content": answer.text})
    if answer.calls:
        yield chunk({"tool_calls": [{"index": n, **tool_call(one)} for n, one in enumerate(answer.calls)]})
    ids = {"token_ids": answer.ids} if request.return_token_ids else {}
    yield chunk({}, _reason(answer), **ids)
    if request.stream_options.include_usage:
        yield sse(head | {"choices": [], "usage": usage(answer.tokens_in, len(answer.ids))})
    yield "data: [DONE]\n\n"


def _reason(answer: Answer) -> str:
    if answer.truncated:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _head(kind: str, answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": model}
