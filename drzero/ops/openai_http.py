"""What our servers with OpenAI's API share: refusals in its words, bounded bodies, events of a stream."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse

GONE = 499  # nginx's status for a client that closed its request
BODY_S = 60.0  # For the whole body to arrive


class RequestRefused(Exception):
    """A request that is not answered, in OpenAI's terms."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer to the client."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def without_null(data: Any) -> Any:
    """A body or a part of one, in which null is an absent field."""
    if not isinstance(data, dict):
        return data
    return {name: value for name, value in data.items() if value is not None}


def only(*allowed: Any) -> AfterValidator:
    """For a field that the server knows but takes with these values alone."""

    def check(value: Any) -> Any:
        if value not in allowed:
            shown = " or ".join(map(repr, allowed))
            raise PydanticCustomError("unsupported", "this server takes {shown} alone", {"shown": shown})
        return value

    return AfterValidator(check)


def refusal(error: ValidationError) -> RequestRefused:
    """A request's error that says most about its place, and that place."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda one: len(one["loc"]))  # a union has one error for each of its kinds
    place = ".".join(part for part in map(str, first["loc"]) if "[" not in part)
    code = "unsupported_value" if first["type"] == "unsupported" else None
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        code, message = "unsupported_parameter", "this server does not know this field"
    return RequestRefused(f"{place or 'body'}: {message}", place or None, code)


def unknown_model(asked: str, known: Any, advice: str = "") -> RequestRefused:
    """The refusal of a model's name."""
    message = f"The model {asked!r} does not exist here: this server has {known}{advice}"
    return RequestRefused(message, "model", "model_not_found", status=404)


async def read_body(request: Request, most: int) -> bytes:
    """Refused with a 413 once more than `most` bytes have arrived, with a 408 if it takes too long."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > most:
                    raise RequestRefused(f"the body is longer than {most} bytes", status=413)
    except TimeoutError:
        raise RequestRefused(f"the body did not arrive within {BODY_S:g} s", status=408) from None
    return bytes(content)


def usage(tokens_in: int, tokens_out: int) -> dict[str, int]:
    """What an answer took, as OpenAI reports it."""
    both = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
    return both | {"total_tokens": tokens_in + tokens_out}


def sse(data: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
