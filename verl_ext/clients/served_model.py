"""A model behind an OpenAI-compatible *completions* server: token ids in, token ids out."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, TypeVar

import httpx
from annotated_types import Ge, MinLen
from pydantic import BaseModel, ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from drzero.ops.bearer import bearer_headers, bearer_of, without_token
from drzero.ops.errors import UserError
from drzero.ops.telemetry import waiting
from drzero.ops.text import encodable
from verl_ext.episodes import Sampled
from verl_ext.method.chat import turn_end_id, turn_ends


class SolverServerError(UserError):
    """The server refuses the request or returns no completion, so the configuration is wrong."""


class ServerUnavailable(Exception):
    """The server could not answer now. The request is retried."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s  # pause before the next try, if the server asks for one


_SHOWN = 300  # length to which a server's words are cut in messages
NOT_LET_IN = (401, 403)  # status of a missing or wrong key


def not_let_in(url: str, status: int, said: str, variable: str | None) -> SolverServerError:
    """The error for a missing or wrong key, which names the variable without showing the key."""
    named = f"the environment variable {variable}"
    why = f"the key in {named} is not accepted" if bearer_of(variable) else f"there is no key in {named}"
    return SolverServerError(
        f"{url} does not let us in (HTTP {status}: {said}): {why}; set it, or name another with endpoint_key="
    )


def http_client(concurrency: int, key_variable: str | None, trust_env: bool) -> httpx.AsyncClient:
    """A client without a read timeout: conversations have a deadline, and long generations are normal."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=10.0),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        headers=bearer_headers(key_variable),
        trust_env=trust_env,
    )


def retrying(retries: int, pause: Callable[[RetryCallState], float]) -> AsyncRetrying:
    """Attempts at a request, repeated after ServerUnavailable."""
    return AsyncRetrying(
        retry=retry_if_exception_type(ServerUnavailable),
        stop=stop_after_attempt(retries + 1),
        wait=pause,
        reraise=True,
    )


def error_of(response: httpx.Response) -> Mapping[str, Any]:
    """The error an answer holds, in OpenAI's form, or nothing."""
    with suppress(ValueError, RecursionError):
        body = encodable(response.json())
        error = body.get("error") if isinstance(body, Mapping) else None
        return error if isinstance(error, Mapping) else {"message": error}
    return {}


def words_of(response: httpx.Response, key_variable: str | None) -> str:
    """The server's own words in one line, without the key."""
    said = " ".join(str(error_of(response).get("message") or response.text).split())
    return without_token(said, key_variable)[:_SHOWN]


Answer = TypeVar("Answer", bound=BaseModel)


def read_answer(response: httpx.Response, shape: type[Answer], said: str, *, has_answered: bool) -> Answer:
    """Parse a whole answer. Raises SolverServerError for a bad one, ServerUnavailable after a good one."""
    try:
        return shape.model_validate(encodable(response.json()))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        what = "no JSON" if isinstance(error, ValueError) else "nested too deeply"
    kind = ServerUnavailable if has_answered else SolverServerError
    raise kind(f"{response.url} did not answer as an OpenAI endpoint ({what}): {said}")


class _Text(BaseModel):
    text: str
    finish_reason: str | None
    token_ids: list[Annotated[int, Ge(0)]] | None = None


class _Completions(BaseModel):
    choices: Annotated[list[_Text], MinLen(1)]


@dataclass(eq=False)
class ServedModel:
    """One model of one server."""

    completions_url: str  # the full address of the endpoint
    model_name: str
    tokenizer: Any
    _: KW_ONLY
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 64  # conversations at once
    deadline_s: float = 300.0  # per conversation
    retries: int = 3  # per request
    key_variable: str | None = None  # environment variable with this server's key, if any

    def __post_init__(self) -> None:
        self._answered = False
        # An agent that uses a chat endpoint has no tokenizer.
        self._ends = frozenset[int]() if self.tokenizer is None else turn_ends(self.tokenizer)
        self._slots = asyncio.Semaphore(self.concurrency)
        # A proxy set for the internet must not receive calls to our own services.
        self._http = http_client(self.concurrency, self.key_variable, trust_env=False)

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._http.aclose()

    async def complete(self, context: Sequence[int], max_tokens: int, seed: int | None = None) -> Sampled:
        """Sample one turn. Raises ServerUnavailable after the last retry and SolverServerError at once."""
        request: dict[str, Any] = {
            "model": self.model_name,
            "prompt": list(context),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            # Off, or SGLang and vLLM would use the value in the model's generation config.
            "top_k": -1,
            "stop_token_ids": sorted(self._ends),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if seed is not None:
            request["seed"] = seed
        async for attempt in retrying(self.retries, wait_random_exponential(multiplier=0.2, max=5.0)):
            with attempt, waiting("completion", self.deadline_s):
                completion = self._read(await self._post(request))
        return completion

    async def _post(self, request: dict[str, Any]) -> httpx.Response:
        try:
            response = await self._http.post(self.completions_url, json=request)
        except httpx.RequestError as error:
            raise ServerUnavailable(f"{type(error).__name__} {error}".rstrip()) from error
        # Any other client error means that the request is wrong.
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise ServerUnavailable(f"HTTP {response.status_code} {words_of(response, self.key_variable)}")
        if response.status_code != 200:
            said = words_of(response, self.key_variable)
            if response.status_code in NOT_LET_IN:
                raise not_let_in(self.completions_url, response.status_code, said, self.key_variable)
            raise SolverServerError(
                f"{self.completions_url} refused a completion with HTTP {response.status_code}: "
                f"{said} (model {self.model_name!r}, {len(request['prompt'])} prompt tokens): "
                "check the address, the model name and the server's context length"
            )
        return response

    def _read(self, response: httpx.Response) -> Sampled:
        said = words_of(response, self.key_variable)
        choice = read_answer(response, _Completions, said, has_answered=self._answered).choices[0]
        text, finish_reason, ids = choice.text, choice.finish_reason, choice.token_ids
        if finish_reason not in ("stop", "length"):  # SGLang answers an aborted request with 200
            raise ServerUnavailable(f"the completion ended with {finish_reason!r}")
        self._answered = True
        if ids is None:  # a server that returns only text and may have trimmed the end token
            ids = list(self.tokenizer.encode(text, add_special_tokens=False))
            if finish_reason == "stop" and self._ends.isdisjoint(ids[-1:]):
                ids.append(turn_end_id(self.tokenizer))
        return Sampled(ids, truncated=finish_reason == "length")
