"""An agent that searches: one conversation over several turns, with tool calls answered in between.

Solver attempts, synthesis and evaluation run their conversations here, against a served model; veRL's
rollouts run theirs in `verl_ext.rollout.search_agent_loop`. Both build the same ids from the same samples,
call the tool by the same rules and return the same `Trajectory` (a test drives both with one script).

It uses any OpenAI-compatible *completions* server, with token ids as the prompt: a chat endpoint would render
the history again for each turn and change its tokens.

    agent = SearchAgent("http://127.0.0.1:8001/v1/completions", "solver", tokenizer, search_client, topk=3, …)
    conversation = await agent.converse(messages)

A conversation is *finished* when the model ended it or reached a limit. If a service failed or the deadline
passed, it is unfinished, has the cause, and must not be scored. An agent's connections belong to the event
loop in which it is first used: one agent per loop, and `aclose` at the end.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ops.errors import UserError
from search.client import SearchRefused, SearchUnavailable
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids, turn_end_id
from verl_ext.method.passages import RESPONSE_LIMIT, format_passages
from verl_ext.method.prompts import MAX_TURNS, Message
from verl_ext.method.search_tool_schema import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA
from verl_ext.method.tool_calls import invalid_call_response, parse_tool_calls, refuse_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.telemetry import waiting


class SolverServerError(UserError):
    """The solver server refuses the request or does not return a completion: the configuration is wrong."""


class _Unavailable(Exception):
    """The server could not answer now; the request is retried."""


class Retriever(Protocol):
    """What the agent uses of the search client; failures are `SearchUnavailable` or `SearchRefused`."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Any]]:
        """The passages for each query, best first."""
        ...


@dataclass(frozen=True)
class Conversation:
    """One conversation, finished or not."""

    trajectory: Trajectory
    finished: bool
    failure: str | None
    """Why the conversation is unfinished; None if it is finished."""
    tokens_in: int
    """Prompt tokens sent, summed over the turns."""
    tokens_out: int
    """Tokens sampled."""
    searches: int
    """Search calls that were answered."""
    latency_s: float
    """Wall-clock seconds, without the wait for a free slot."""


@dataclass
class _Progress:
    """What a conversation has done so far, kept if it is interrupted."""

    turns: list[Turn] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0


class _Completion(NamedTuple):
    ids: list[int]
    text: str
    truncated: bool


@dataclass(eq=False)
class SearchAgent:
    """Plays conversations against one completions server and one search service."""

    completions_url: str
    """The full address of the endpoint."""
    model_name: str
    tokenizer: Any
    search: Retriever
    _: KW_ONLY
    topk: int
    max_tokens_per_turn: int
    max_context_tokens: int
    """Bounds prompt plus response of a conversation."""
    max_turns: int = MAX_TURNS
    tool_response_limit: int = RESPONSE_LIMIT
    """In characters."""
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 64
    """Conversations in flight."""
    deadline_s: float = 300.0
    """Of one conversation."""
    retries: int = 3
    """Per request."""

    def __post_init__(self) -> None:
        self._turn_end_id = turn_end_id(self.tokenizer)
        self._slots = asyncio.Semaphore(self.concurrency)
        self._http = httpx.AsyncClient(
            # No read timeout: the conversation's deadline bounds it, and long generations are normal.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            # A proxy set for the internet must not receive calls to our own services.
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections to the solver server; the search client is its owner's to close."""
        await self._http.aclose()

    async def converse(self, messages: Sequence[Message], seed: int | None = None) -> Conversation:
        """Run one conversation from its prompt; the same seed gives the same turns from the same server.

        Raises SolverServerError when the server refuses the request itself.
        """
        progress = _Progress()
        async with self._slots:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.deadline_s):
                    failure = await self._play(messages, seed, progress)
            except TimeoutError:
                failure = f"the conversation did not end within {self.deadline_s:g} s"
            except _Unavailable as error:
                failure = f"the solver server at {self.completions_url} failed: {error}"
            latency_s = time.monotonic() - started
        trajectory = Trajectory(tuple(progress.turns))
        return Conversation(
            trajectory=trajectory,
            finished=failure is None,
            failure=failure,
            tokens_in=progress.tokens_in,
            tokens_out=progress.tokens_out,
            searches=len(trajectory.searches),
            latency_s=latency_s,
        )

    async def _play(self, messages: Sequence[Message], seed: int | None, progress: _Progress) -> str | None:
        """Sample turns until the model is done; returns why a search failed, or None."""
        context = render_prompt_ids(self.tokenizer, messages, [SEARCH_TOOL_SCHEMA])
        for turn_number in range(1, self.max_turns + 1):
            room = min(self.max_tokens_per_turn, self.max_context_tokens - len(context))
            if room <= 0:
                return None
            completion = await self._complete(context, room, seed)
            progress.tokens_in += len(context)
            progress.tokens_out += len(completion.ids)
            calls = tuple(parse_tool_calls(completion.text))
            # The passages of a call in the last turn would not be read.
            if calls and turn_number < self.max_turns:
                answered = await asyncio.gather(*map(self._respond, calls[:MAX_CALLS_PER_TURN]))
                calls = (*answered, *calls[MAX_CALLS_PER_TURN:])
            progress.turns.append(Turn(completion.text, calls, completion.truncated))
            failed = [call for call in calls if call.failed]
            if failed:
                return f"a search failed: {failed[0].error}"
            if not calls:
                return None
            responses = [call.response or "" for call in calls[:MAX_CALLS_PER_TURN]]
            context += completion.ids + tool_turn_ids(self.tokenizer, completion.ids, responses)
        return None

    async def _respond(self, call: SearchCall) -> SearchCall:
        """The call with the response that the model is shown."""
        if call.queries is None:
            return replace(call, response=invalid_call_response(call))
        try:
            with waiting("search", getattr(self.search, "deadline_s", None)):
                results = await self.search.retrieve(call.queries, self.topk)
        except SearchUnavailable as error:
            return replace(call, failed=True, error=str(error))
        except SearchRefused as refusal:
            return refuse_call(call, refusal.detail)
        return replace(call, response=format_passages(call.queries, results, self.tool_response_limit))

    async def _complete(self, context: Sequence[int], max_tokens: int, seed: int | None) -> _Completion:
        """Sample one turn; raises _Unavailable after the last retry and SolverServerError at once."""
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
            retry=retry_if_exception_type(_Unavailable),
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
            raise _Unavailable(f"{type(error).__name__} {error}".rstrip()) from error
        # Every other client error means that the request is wrong.
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _Unavailable(f"HTTP {response.status_code} {response.text[:200]}")
        if response.status_code != 200:
            raise SolverServerError(
                f"{self.completions_url} refused a completion with HTTP {response.status_code}: "
                f"{response.text[:500]} (model {self.model_name!r}, {len(request['prompt'])} prompt tokens): "
                "check the address, the model name and the server's context length"
            )
        return response

    def _read(self, response: httpx.Response) -> _Completion:
        try:
            choice = response.json()["choices"][0]
            text, finish_reason = str(choice["text"]), choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            answer = f"{response.text[:200]!r}"
            raise SolverServerError(
                f"{self.completions_url} did not answer as an OpenAI completions endpoint: {answer}"
            ) from error
        if finish_reason not in ("stop", "length"):  # SGLang answers an aborted request with 200
            raise _Unavailable(f"the completion ended with {finish_reason!r}")
        ids = choice.get("token_ids")
        if ids is None:  # a server that returns text only, and may have trimmed the end token
            ids = list(self.tokenizer.encode(text, add_special_tokens=False))
            if finish_reason == "stop" and ids[-1:] != [self._turn_end_id]:
                ids.append(self._turn_end_id)
        # As in the rollout: special tokens are not part of a turn's text.
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return _Completion(ids=ids, text=text, truncated=finish_reason == "length")
