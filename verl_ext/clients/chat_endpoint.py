"""A chat-completions endpoint with tool calls, for models that nobody trains."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, NamedTuple

import httpx
from annotated_types import MinLen
from pydantic import BaseModel
from tenacity import RetryCallState, wait_random_exponential

from drzero.ops.telemetry import waiting
from drzero.ops.text import is_loopback, is_number
from environments.call import ToolSchema
from environments.turn_text import THINK, THINK_END
from verl_ext.clients.served_model import (
    NOT_LET_IN,
    ServerUnavailable,
    SolverServerError,
    error_of,
    http_client,
    not_let_in,
    read_answer,
    retrying,
    words_of,
)
from verl_ext.method.search_calls import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA, parse_call, parse_tool_calls
from verl_ext.method.trajectory import SearchCall

LONGEST_PAUSE_S = 60.0  # Longest pause before a retry, whatever the server asks for
_BACKOFF = wait_random_exponential(multiplier=0.5, max=20.0)
_ABOUT_THE_REQUEST = (400, 413, 422)  # refusals that need not affect other conversations
_OTHER_NAMES = {"max_tokens": "max_completion_tokens"}
_OPTIONAL = ("temperature", "top_p", "seed")
# OpenAI's code, and the words of vLLM, SGLang and OpenAI
_FULL, _FULL_WORDS = "context_length_exceeded", "context length"
_MOST_TOKENS = 1e9  # of one request; a larger count is a mistake


class ConversationRefused(Exception):
    """The server refuses this conversation. Others may continue."""


class ConversationFull(ConversationRefused):
    """The conversation is longer than the model's context."""


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | list[Any] | None = None


class _ToolCall(BaseModel):
    id: str | int | None = None
    function: _Function


class _Message(BaseModel):
    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None


class _ChatCompletion(BaseModel):
    choices: Annotated[list[_Choice], MinLen(1)]
    usage: Any = None

    def tokens(self, name: str) -> int:
        """0 for a count that is missing or no number."""
        count: Any = self.usage.get(name) if isinstance(self.usage, Mapping) else None
        return int(count) if is_number(count) and 0 <= count < _MOST_TOKENS else 0


class Reply(NamedTuple):
    """One assistant turn."""

    text: str
    calls: tuple[SearchCall, ...]
    truncated: bool
    tokens_in: int
    tokens_out: int


@dataclass(eq=False)
class ChatEndpoint:
    """One model behind an endpoint. Its connections belong to one event loop, until `aclose`."""

    base_url: str  # such as `https://api.example.com/v1`
    model: str
    _: KW_ONLY
    key_variable: str | None = None  # environment variable with this server's key, if any
    concurrency: int = 64  # requests at once
    retries: int = 5  # per request

    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # of failed requests, by reason
    without_usage: int = 0  # answers without token counts

    def __post_init__(self) -> None:
        self.url = f"{self.base_url}/chat/completions"
        self._answered = False
        self._renamed: dict[str, str] = {}
        self.left_out: set[str] = set()  # optional parameters that the model rejects
        self._http = self._client()

    def _client(self) -> httpx.AsyncClient:
        # A proxy set for the internet must not receive calls to our own services.
        remote = not is_loopback(self.base_url)
        return http_client(self.concurrency, self.key_variable, trust_env=remote)

    async def aclose(self) -> None:
        """Close the connections. Another event loop may then use it."""
        await self._http.aclose()
        self._http = self._client()

    async def greet(self, messages: Sequence[Mapping[str, Any]], deadline_s: float) -> None:
        """Ask once before a run, as the run will. Raises SolverServerError with the endpoint's own reason."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.dialogue(messages, max_tokens_per_turn=16, max_context_tokens=16).reply(0)
        except TimeoutError:
            raise SolverServerError(f"{self.url} did not answer within {deadline_s:g} s") from None
        except (ServerUnavailable, ConversationRefused, httpx.InvalidURL, ValueError, OSError) as error:
            raise SolverServerError(f"{self.url} does not answer: {error}") from error
        finally:
            await self.aclose()

    def dialogue(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> "ChatDialogue":
        """Begin a conversation. `sampling` are fields of ChatDialogue."""
        return ChatDialogue(self, [dict(message) for message in messages], **sampling)

    async def ask(self, request: Mapping[str, Any]) -> _ChatCompletion:
        """Raises ServerUnavailable after the last retry, ConversationRefused or SolverServerError at once."""
        async for attempt in retrying(self.retries, _pause):
            with attempt, waiting("completion"):
                answer = await self._ask_once(request)
        return answer

    async def _ask_once(self, request: Mapping[str, Any]) -> _ChatCompletion:
        for _ in range(len(_OPTIONAL) + len(_OTHER_NAMES) + 1):
            sent = {
                self._renamed.get(name, name): value
                for name, value in request.items()
                if name not in self.left_out
            }
            self.requests += 1
            try:
                response = await self._http.post(self.url, json=sent)
                if not self._adapts_to(response, sent):
                    return self._read(response)
            except httpx.RequestError as error:
                self.failures[type(error).__name__] += 1
                raise ServerUnavailable(f"{type(error).__name__} {error}".rstrip()) from error
            except ServerUnavailable as error:
                self.failures[str(error)[:200]] += 1
                raise
        raise SolverServerError(f"{self.url} refuses every form of a request: {self._words(response)}")

    def _read(self, response: httpx.Response) -> _ChatCompletion:
        if response.status_code != 200:
            raise self._fault(response)
        said = self._words(response)
        answer = read_answer(response, _ChatCompletion, said, has_answered=self._answered)
        finish_reason = answer.choices[0].finish_reason
        if finish_reason == "content_filter":
            raise ConversationRefused("the endpoint's filter cut the answer off")
        if finish_reason not in ("stop", "length", "tool_calls"):  # such as "abort"
            raise ServerUnavailable(f"the completion ended with {finish_reason!r}")
        self._answered = True
        return answer

    def _fault(self, response: httpx.Response) -> Exception:
        status, said = response.status_code, self._words(response)
        http = f"HTTP {status}: {said}"
        if error_of(response).get("code") == "insufficient_quota" or status == 402:
            return SolverServerError(f"{self.url}: the account's budget is used up ({http})")
        if status in (408, 409, 425, 429) or status >= 500:
            return ServerUnavailable(http, _seconds(response.headers.get("retry-after")))
        if status in NOT_LET_IN:
            return not_let_in(self.url, status, said, self.key_variable)
        if self._answered and status not in _ABOUT_THE_REQUEST:
            return ServerUnavailable(http)
        if status == 404:
            return SolverServerError(
                f"{self.url} does not have the model {self.model!r} ({http}): check its name "
                "(endpoint_model=) and the address (endpoint=)"
            )
        if self._answered:
            is_full = error_of(response).get("code") == _FULL or _FULL_WORDS in said.casefold()
            kind = ConversationFull if is_full else ConversationRefused
            return kind(f"the endpoint refuses the conversation ({http})")
        return SolverServerError(
            f"{self.url} refused a request for {self.model!r} ({http}): check the address, the model, and "
            "whether it takes tools"
        )

    def _adapts_to(self, response: httpx.Response, sent: Mapping[str, Any]) -> bool:
        """Drop or rename a parameter that the model rejects. Returns whether to ask again."""
        if response.status_code != 400:
            return False
        error = error_of(response)
        name = str(error.get("param"))
        if not str(error.get("code")).startswith("unsupported") or name not in sent:
            return False
        if name in _OTHER_NAMES:
            self._renamed[name] = _OTHER_NAMES[name]
        elif name in _OPTIONAL:
            self.left_out.add(name)
        else:
            return False
        return True

    def _words(self, response: httpx.Response) -> str:
        return words_of(response, self.key_variable)


@dataclass(eq=False)
class ChatDialogue:
    """One conversation with an endpoint."""

    endpoint: ChatEndpoint
    messages: list[dict[str, Any]]
    _: KW_ONLY
    tools: Sequence[ToolSchema] = (SEARCH_TOOL_SCHEMA,)
    max_tokens_per_turn: int
    max_context_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        self._used = 0
        self._asked: list[dict[str, Any]] = []  # the calls to answer, as the server wrote them

    async def reply(self, seed: int | None) -> Reply | None:
        """The next turn, or None without room for one. Raises as `ChatEndpoint.ask` does."""
        room = min(self.max_tokens_per_turn, self.max_context_tokens - self._used)
        if room <= 0:
            return None
        request: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": self.messages,
            "max_tokens": room,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.tools:
            request["tools"] = list(self.tools)
        if seed is not None:
            request["seed"] = seed
        try:
            answer = await self.endpoint.ask(request)
        except ConversationFull:
            if not self._used:  # the question alone is too long
                raise
            return None
        tokens_in, tokens_out = answer.tokens("prompt_tokens"), answer.tokens("completion_tokens")
        self.endpoint.without_usage += not tokens_in
        self._used = tokens_in + tokens_out
        choice = answer.choices[0]
        text, calls = self._hear(choice.message)
        # The passages in the request were not counted before.
        is_over = self._used > self.max_context_tokens
        return Reply(text, calls, is_over or choice.finish_reason == "length", tokens_in, tokens_out)

    def answer(self, responses: Sequence[str]) -> None:
        """Add the tool's responses to the last turn's calls, in order."""
        if not self._asked:  # the calls were in the text, so the server knows of none
            shown = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
            self.messages.append({"role": "user", "content": shown})
        for call, response in zip(self._asked, responses, strict=False):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": response})

    def _hear(self, message: _Message) -> tuple[str, tuple[SearchCall, ...]]:
        """Add the message. Returns its text as a served policy writes it, and its calls."""
        content = _text(message.content)
        thought = _text(message.reasoning_content or message.reasoning).strip()
        text = content
        if THINK not in content and (thought or THINK_END in content):  # the template may have opened it
            text = f"{THINK}{thought}{THINK_END}\n{content}" if thought else THINK + content
        asked = [_call(call, number) for number, call in enumerate(message.tool_calls or ())]
        self._asked = asked[:MAX_CALLS_PER_TURN]
        heard: dict[str, Any] = {"role": "assistant", "content": content or None}
        if not asked:
            self.messages.append(heard | {"content": content})
            return text, tuple(parse_tool_calls(text))
        self.messages.append(heard | {"tool_calls": self._asked})
        written = [
            f'\n{{"name": {json.dumps(one["name"])}, "arguments": {one["arguments"] or "null"}}}\n'
            for one in (call["function"] for call in asked)
        ]
        blocks = "\n".join(f"<tool_call>{raw}</tool_call>" for raw in written)
        return f"{text}\n{blocks}".lstrip(), tuple(map(parse_call, written))


def _call(call: _ToolCall, number: int) -> dict[str, Any]:
    """Add an id, and write the arguments as text."""
    arguments = call.function.arguments or ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": call.function.name, "arguments": text}
    return {"id": str(call.id or f"call_{number}"), "type": "function", "function": named}


def _text(content: Any) -> str:
    """Some servers give a message's text in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _seconds(header: str | None) -> float | None:
    with suppress(ValueError):
        seconds = float(header or "nan")
        return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_PAUSE_S)
    return None


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.pause_s if isinstance(error, ServerUnavailable) else None
    return float(_BACKOFF(state)) if asked is None else asked
