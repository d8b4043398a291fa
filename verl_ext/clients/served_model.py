"""A model behind an OpenAI-compatible *completions* server: token ids in, token ids out.

    model = ServedModel("http://127.0.0.1:8001/v1/completions", "solver", tokenizer)
    completion = await model.complete(prompt_ids, max_tokens=96)

A chat endpoint would render the history again for each turn and change its tokens. Its connections belong to
the event loop in which it is first used: one per loop, and `aclose` at the end.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from drzero.ops.bearer import bearer_headers, bearer_of, without_token
from drzero.ops.errors import UserError
from verl_ext.method.chat import turn_end_id
from verl_ext.telemetry import waiting


class SolverServerError(UserError):
    """The solver server refuses the request or does not return a completion: the configuration is wrong."""


class ServerUnavailable(Exception):
    """The server could not answer now; the request is repeated."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """Before the next try, as the server asks for it."""


NOT_LET_IN = (401, 403)
"""What a server answers whose key is missing or wrong."""


def not_let_in(url: str, status: int, said: str, variable: str | None) -> SolverServerError:
    """The error of such an answer, which names the variable and does not show the key."""
    named = f"the environment variable {variable}"
    why = f"the key in {named} is not accepted" if bearer_of(variable) else f"there is no key in {named}"
    return SolverServerError(
        f"{url} does not let us in (HTTP {status}: {said}): {why}; set it, or name another with endpoint_key="
    )


class Completion(NamedTuple):
    """One turn as it was sampled."""

    ids: list[int]
    text: str
    """Without special tokens, which are not part of a turn's text."""
    truncated: bool


@dataclass(eq=False)
class ServedModel:
    """One model of one server, with at most so many requests at once."""

    completions_url: str
    """The full address of the endpoint."""
    model_name: str
    tokenizer: Any
    _: KW_ONLY
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 64
    """Conversations in flight."""
    deadline_s: float = 300.0
    """Of one conversation."""
    retries: int = 3
    """Per request."""
    key_variable: str | None = None
    """The environment variable whose key this server gets; None sends it none."""

    def __post_init__(self) -> None:
        # An agent that converses with a chat endpoint has no tokenizer.
        self._turn_end_id = None if self.tokenizer is None else turn_end_id(self.tokenizer)
        self._slots = asyncio.Semaphore(self.concurrency)
        self._http = httpx.AsyncClient(
            # No read timeout: the conversation's deadline bounds it, and long generations are normal.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            headers=bearer_headers(self.key_variable),
            # A proxy set for the internet must not receive calls to our own services.
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._http.aclose()

    async def complete(self, context: Sequence[int], max_tokens: int, seed: int | None = None) -> Completion:
        """Sample one turn; raises ServerUnavailable after the last retry and SolverServerError at once."""
        request: dict[str, Any] = {
            "model": self.model_name,
            "prompt": list(context),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            # Off; otherwise SGLang and vLLM use the value in the model's generation config.
            "top_k": -1,
            "stop_token_ids": [self._turn_end_id],
            "return_token_ids": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if seed is not None:
            request["seed"] = seed
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(ServerUnavailable),
            stop=stop_after_attempt(self.retries + 1),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        ):
            with attempt, waiting("completion", self.deadline_s):
                completion = self._read(await self._post(request))
        return completion

    async def _post(self, request: dict[str, Any]) -> httpx.Response:
        try:
            response = await self._http.post(self.completions_url, json=request)
        except httpx.TransportError as error:
            raise ServerUnavailable(f"{type(error).__name__} {error}".rstrip()) from error
        # Every other client error means that the request is wrong.
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise ServerUnavailable(f"HTTP {response.status_code} {self._words(response)[:200]}")
        if response.status_code != 200:
            said = self._words(response)[:500]
            if response.status_code in NOT_LET_IN:
                raise not_let_in(self.completions_url, response.status_code, said, self.key_variable)
            raise SolverServerError(
                f"{self.completions_url} refused a completion with HTTP {response.status_code}: "
                f"{said} (model {self.model_name!r}, {len(request['prompt'])} prompt tokens): "
                "check the address, the model name and the server's context length"
            )
        return response

    def _words(self, response: httpx.Response) -> str:
        """The server's own words, without the key if it repeats that."""
        return without_token(response.text, self.key_variable)

    def _read(self, response: httpx.Response) -> Completion:
        try:
            choice = response.json()["choices"][0]
            text, finish_reason = str(choice["text"]), choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            answer = f"{self._words(response)[:200]!r}"
            raise SolverServerError(
                f"{self.completions_url} did not answer as an OpenAI completions endpoint: {answer}"
            ) from error
        if finish_reason not in ("stop", "length"):  # SGLang answers an aborted request with 200
            raise ServerUnavailable(f"the completion ended with {finish_reason!r}")
        ids = choice.get("token_ids")
        if ids is None:  # a server that returns text only, and may have trimmed the end token
            ids = list(self.tokenizer.encode(text, add_special_tokens=False))
            if finish_reason == "stop" and ids[-1:] != [self._turn_end_id]:
                ids.append(self._turn_end_id)
        # As in the rollout: special tokens are not part of a turn's text.
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(ids=ids, text=text, truncated=finish_reason == "length")
