"""An engine over HTTP: token ids in, token ids with their log-probabilities out.

    engine = await find_engine(http, model="solver", stop_ids=[2])
    continued = await engine.sample([5, 6, 7], Sampling(max_tokens=32, top=2))

SGLang is asked at `/generate`, as by veRL's rollouts. Other servers are asked at OpenAI's `/v1/completions`
with vLLM's names for ids.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from drzero.ops.errors import RunFailed
from verl_ext.engine.sampling import TopLogProbs

_SGLANG_PLACES = ("/model_info", "/get_model_info")
_NO_CHAT = (404, 405, 501)
_REFUSED = (400, 422)  # for an unknown field
_SHOWN = 300  # characters of a server's answer in a message


class EngineUnfit(RunFailed):
    """The engine does not answer, or not with the ids and log-probabilities a comparison needs."""


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    top: int = 0  # how many of the most probable ids to report at each position

    @property
    def filters(self) -> bool:
        """Whether it excludes ids."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Continued:
    """The sampled ids, and the engine's log-probability of each."""

    ids: list[int]
    log_probs: list[float]
    tops: list[TopLogProbs]  # At each position. Empty if the engine does not report them.


@dataclass(frozen=True)
class ServerPrompt:
    """A server's rendering of messages: its ids, or their number if it hides them."""

    ids: list[int] | None
    count: int | None


@dataclass(frozen=True)
class Engine:
    """One served model."""

    http: httpx.AsyncClient
    model: str
    stop_ids: Sequence[int]
    slots: asyncio.Semaphore
    is_sglang: bool
    shows_tops: bool = True  # reports the log-probabilities of other ids than the sampled ones

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> Continued:
        """Continue a prompt. SGLang ignores the seed. Raises EngineUnfit."""
        if self.is_sglang:
            continued = _of_sglang(await self._post("/generate", self._native(ids, sampling)))
        else:
            answer = await self._post("/v1/completions", self._completion(ids, sampling, seed))
            continued = _of_completion(answer)
        if not len(continued.ids) == len(continued.log_probs) > 0:
            counts = f"{len(continued.ids)} ids and {len(continued.log_probs)} log-probabilities"
            raise EngineUnfit(f"the engine at {self.http.base_url} answered with {counts}")
        return continued

    async def prompt_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> ServerPrompt | None:
        """The server's rendering of messages by its own template. None if it has no chat."""
        body = {"model": self.model, "messages": list(messages), "tools": list(tools), "max_tokens": 1}
        # vLLM and SGLang name the fields differently, and some servers refuse unknown ones.
        response = await self._send("/v1/chat/completions", body | _SHOW_PROMPT)
        if response.status_code in _REFUSED:
            response = await self._send("/v1/chat/completions", body)
        if response.status_code in _NO_CHAT:
            return None
        answer = self._checked(response)
        found = [place.get("prompt_token_ids") for place in (answer, *answer.get("choices", ()))]
        ids = next((each for each in found if each), None)
        return ServerPrompt(ids, (answer.get("usage") or {}).get("prompt_tokens"))

    def _native(self, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        ending = {"max_new_tokens": sampling.max_tokens, "stop_token_ids": list(self.stop_ids)}
        return {
            "input_ids": list(ids),
            "sampling_params": chosen | ending,
            "return_logprob": True,
            "top_logprobs_num": sampling.top,
        }

    def _completion(self, ids: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        shown = {"logprobs": sampling.top, "return_tokens_as_token_ids": True}
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "stop_token_ids": list(self.stop_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            **(shown if self.shows_tops else {"logprobs": 0}),
        }

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._checked(await self._send(path, body))

    async def _send(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        async with self.slots:
            try:
                return await self.http.post(path, json=dict(body))
            except httpx.HTTPError as error:
                why = f"{type(error).__name__} {error}".rstrip()
                raise EngineUnfit(f"no answer from {self.http.base_url} at {path}: {why}") from error

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.status_code != 200 or not isinstance(body, dict):
            said = response.text[:_SHOWN]
            raise EngineUnfit(f"{response.request.url} answered with HTTP {response.status_code}: {said}")
        return body


_SHOW_PROMPT = {"return_token_ids": True, "return_prompt_token_ids": True}


async def find_engine(
    http: httpx.AsyncClient, model: str, stop_ids: Sequence[int], concurrency: int = 32
) -> Engine:
    """The engine at the client's address, with at most `concurrency` requests at once."""
    is_sglang = False
    for place in _SGLANG_PLACES:
        try:
            response = await http.get(place)
        except httpx.HTTPError as error:
            why = f"{type(error).__name__} {error}".rstrip()
            raise EngineUnfit(f"no answer from {http.base_url}: {why}") from error
        if is_sglang := response.status_code == 200 and "model_path" in response.text:
            break
    engine = Engine(http, model, stop_ids, asyncio.Semaphore(concurrency), is_sglang)
    if is_sglang:
        return engine
    tried = await engine._send("/v1/completions", engine._completion(stop_ids[:1], Sampling(1, top=2), 0))
    return replace(engine, shows_tops=tried.status_code not in _REFUSED)


def _of_sglang(answer: Mapping[str, Any]) -> Continued:
    meta = answer["meta_info"]
    tops = meta.get("output_top_logprobs") or []
    return Continued(
        [int(token) for token in answer["output_ids"]],
        [float(log_prob) for log_prob, *_ in meta["output_token_logprobs"]],
        [[(int(token), float(log_prob)) for log_prob, token, *_ in row] for row in tops],
    )


def _of_completion(answer: Mapping[str, Any]) -> Continued:
    choice = answer["choices"][0]
    ids, log_probs = choice.get("token_ids"), choice.get("logprobs") or {}
    if ids is None or "token_logprobs" not in log_probs:
        raise EngineUnfit(
            "the server returns no token ids or log-probabilities (vLLM's return_token_ids, logprobs), so "
            "its tokens cannot be compared. Use SGLang, vLLM or the reference engine"
        )
    tops = log_probs.get("top_logprobs") or []
    named = [[(name.removeprefix("token_id:"), lp) for name, lp in row.items()] for row in tops]
    return Continued(
        [int(token) for token in ids],
        [float(log_prob) for log_prob in log_probs["token_logprobs"]],
        [sorted(((int(n), lp) for n, lp in row if n.isdigit()), key=lambda one: -one[1]) for row in named],
    )
