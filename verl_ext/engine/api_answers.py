"""Answers in OpenAI's form, complete or streamed.

Text that may become a stop string or a tool call is held back. Malformed calls stay text, as in vLLM.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from drzero.ops.openai_http import RequestRefused, sse, usage
from environments.call import FORMS, Call, ToolSchema, outside_calls, parse_calls
from verl_ext.apis.turn import Answer
from verl_ext.engine.api_requests import ChatRequest, CompletionRequest
from verl_ext.engine.engine import EngineFailure, Generation, ReferenceEngine
from verl_ext.method.chat import (
    call_form,
    decode,
    opened_thinking,
    plain_message,
    render_prompt_ids,
    turn_ends,
    turn_text,
)

_OWN_OPTIONS = {"conversation", "tools", "chat_template", "tokenize", "return_dict", "add_generation_prompt"}
"""Options of `apply_chat_template` that only the server sets."""


@dataclass
class Job:
    """A valid request, ready to be answered: `n` generations of one prompt."""

    engine: ReferenceEngine
    tokenizer: PreTrainedTokenizerBase
    request: CompletionRequest | ChatRequest
    model: str
    prompt: list[int]
    max_tokens: int
    form: str = "hermes"
    tools: Sequence[ToolSchema] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.is_chat = isinstance(self.request, ChatRequest)
        self._key = "content" if self.is_chat else "text"
        self.params = [self.request.sampling(i, self.max_tokens) for i in range(self.request.n)]
        room = self.engine.max_seq_len
        if len(self.prompt) >= room:
            where = "messages" if self.is_chat else "prompt"
            raise RequestRefused(
                f"This model's maximum context length is {room} tokens, and your {where} resulted in "
                f"{len(self.prompt)} tokens: shorten it, and leave room for the completion",
                where,
                "context_length_exceeded",
            )
        self.engine.checked(self.prompt)

    async def whole(self) -> dict[str, Any]:
        """The complete answer. Cancelling it frees its places in the engine's batch."""
        generations = await asyncio.gather(*(self._generate(i) for i in range(len(self.params))))
        choices = [self._choice(i, generation) for i, generation in enumerate(generations)]
        answer = self._head() | {"choices": choices, "usage": self._usage(generations)}
        if isinstance(self.request, ChatRequest) and self.request.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.prompt
        return answer

    async def turn(self) -> Answer:
        """The next turn of a chat, for other APIs than OpenAI's chat. Raises RequestRefused."""
        try:
            one = await self._generate(0)
        except (ValueError, EngineFailure) as error:
            raise RequestRefused(
                str(error), status=503 if isinstance(error, EngineFailure) else 400
            ) from error
        text, calls = self._heard(one)
        return Answer(self.id, text, calls, len(self.prompt), one.token_ids, one.finish_reason == "length")

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events. Closing it early frees its places as well."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int | Generation | Exception]]()

        def hear(index: int, token_id: int) -> None:
            with suppress(RuntimeError):  # the server's loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, (index, token_id))

        async def run(index: int) -> None:
            try:
                pieces.put_nowait((index, await self._generate(index, hear)))
            except (ValueError, EngineFailure) as error:
                pieces.put_nowait((index, error))

        tasks = [asyncio.create_task(run(index)) for index in range(len(self.params))]
        stops, openings = tuple(self.request.stop_strings), FORMS[self.form].openings if self.tools else ()
        texts = [TextStream(self._decode, stops, openings) for _ in tasks]
        done: list[Generation] = []
        try:
            for index in range(len(tasks)) if self.is_chat else ():
                yield self._event(index, {"role": "assistant", "content": ""})
            while len(done) < len(tasks):
                index, piece = await pieces.get()
                if isinstance(piece, Exception):
                    yield sse(RequestRefused(str(piece), status=503).body())
                    return
                if isinstance(piece, int):
                    if text := texts[index].push(piece):
                        yield self._event(index, {self._key: text})
                    continue
                done.append(piece)
                for event in self._last_events(index, piece, texts[index].sent):
                    yield event
            if self.request.stream_options.include_usage:
                yield sse(self._head(".chunk") | {"choices": [], "usage": self._usage(done)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(self, index: int, hear: Callable[[int, int], None] | None = None) -> Generation:
        stopped = stop_checker(self.tokenizer, self.request.stop_strings)

        def after_each(ids: list[int]) -> bool:
            if hear is not None:
                hear(index, ids[-1])
            return stopped is not None and stopped(ids)

        watch = None if hear is None and stopped is None else after_each
        return await self.engine.generate(self.prompt, self.params[index], watch)

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        reason = generation.finish_reason
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            content, calls = self._heard(generation)
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                choice["message"]["tool_calls"] = [tool_call(call) for call in calls]
                choice["finish_reason"] = "tool_calls" if reason == "stop" else reason
        else:
            choice["text"] = self._text(generation)
        if self.request.wants_log_probs:
            choice["logprobs"] = self._log_probs(generation)
        return choice | ({"token_ids": generation.token_ids} if self.request.return_token_ids else {})

    def _heard(self, generation: Generation) -> tuple[str | None, tuple[Call, ...]]:
        opened = opened_thinking(self.tokenizer, self.prompt)
        return heard(self._text(generation), self.tools, self.form, opened)

    def _log_probs(self, generation: Generation) -> dict[str, Any]:
        if isinstance(self.request, CompletionRequest):
            return self._completion_log_probs(generation, self.request)
        tokens = [decode(self.tokenizer, [token_id]) for token_id in generation.token_ids]
        content = [
            {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, log_prob in zip(tokens, generation.log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _completion_log_probs(self, generation: Generation, request: CompletionRequest) -> dict[str, Any]:
        """vLLM's `return_tokens_as_token_ids` names tokens `token_id:N`."""

        def name(token_id: int) -> str:
            as_id = request.return_tokens_as_token_ids
            return f"token_id:{token_id}" if as_id else decode(self.tokenizer, [token_id])

        written = {"tokens": [*map(name, generation.token_ids)], "token_logprobs": generation.log_probs}
        if not request.other_tokens:
            return written
        tops = [{name(token_id): lp for token_id, lp in top} for top in generation.top_log_probs]
        return written | {"top_logprobs": tops}

    def _text(self, generation: Generation) -> str:
        """The text without what ended it, or with it for `no_stop_trim`."""
        ids = generation.token_ids
        text = self._decode(ids)
        if generation.finish_reason != "stop" or self.request.no_stop_trim:
            return text
        ends = [text.find(stop) for stop in self.request.stop_strings if stop in text]
        return text[: min(ends)] if ends else self._decode(ids[:-1])

    def _decode(self, ids: list[int]) -> str:
        if self.tools and self.request.skip_special_tokens:
            return turn_text(self.tokenizer, ids)
        return decode(self.tokenizer, ids, skip_special_tokens=self.request.skip_special_tokens)

    def _head(self, part: str = "") -> dict[str, Any]:
        chat, text = ("chatcmpl", f"chat.completion{part}"), ("cmpl", "text_completion")
        prefix, kind = chat if self.is_chat else text
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        return usage(len(self.prompt), sum(len(one.token_ids) for one in generations))

    def _last_events(self, index: int, generation: Generation, sent: str) -> list[str]:
        choice = self._choice(index, generation)
        message = choice["message"] if self.is_chat else choice
        rest = str(message[self._key] or "")[len(sent) :]
        events = [self._event(index, {self._key: rest})] if rest else []
        if calls := message.get("tool_calls"):
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            events.append(self._event(index, {"tool_calls": numbered}))
        ended = {"finish_reason": choice["finish_reason"]}
        if self.request.return_token_ids:
            ended["token_ids"] = generation.token_ids
        return [*events, self._event(index, {} if self.is_chat else {"text": ""}, **ended)]

    def _event(self, index: int, said: dict[str, Any], **ended: Any) -> str:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **ended}
        choice |= {"delta": said} if self.is_chat else said
        return sse(self._head(".chunk") | {"choices": [choice]})


@dataclass
class TextStream:
    """The part of a generation's text that is certain."""

    decode: Callable[[list[int]], str]
    stops: tuple[str, ...]
    openings: tuple[str, ...]  # of tool calls. Text from there on, and blanks before it, wait for the end
    sent: str = ""
    _ids: list[int] = field(default_factory=list)
    _text: str = ""
    _from: int = 0
    _read: int = 0

    def push(self, token_id: int) -> str:
        """Add an id. Returns the text that can be sent now."""
        self._ids.append(token_id)
        # Decode a window: a token's text depends on the one before it, and a character may need several.
        known = self.decode(self._ids[self._from : self._read])
        window = self.decode(self._ids[self._from :])
        if len(window) > len(known) and not window.endswith("�"):
            self._text += window[len(known) :]
            self._from, self._read = self._read, len(self._ids)
        new = self._certain()[len(self.sent) :]
        self.sent += new
        return new

    def _certain(self) -> str:
        text = self._text
        for mark in (*self.stops, *self.openings):
            text = text.partition(mark)[0]
            # The longest end of the text that the mark may begin with.
            held = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
            text = text[: len(text) - held]
        return text.rstrip() if self.openings else text


def completion_job(
    engine: ReferenceEngine, tokenizer: PreTrainedTokenizerBase, request: CompletionRequest, model: str
) -> Job:
    """The job of a completion. Raises RequestRefused or ValueError."""
    _check_stream(request)
    given = request.prompt
    prompt = tokenizer.encode(given) if isinstance(given, str) else given
    return Job(engine, tokenizer, request, model, prompt, request.max_tokens)


def chat_job(
    engine: ReferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    request: ChatRequest,
    model: str,
    *,
    form: str,
) -> Job:
    """The job of a chat's next turn. Raises RequestRefused or ValueError."""
    _check_stream(request)
    tools = request.shown_tools
    prompt = _chat_prompt(tokenizer, request, tools)
    with suppress(ValueError, TemplateError):  # without such a token, a model's own ids end its turns
        ends = (*request.stop_token_ids, *turn_ends(tokenizer))
        request = request.model_copy(update={"stop_token_ids": ends})
    limit = engine.max_seq_len if request.most_tokens is None else request.most_tokens
    form = call_form(tokenizer, form) if tools else "hermes"
    return Job(engine, tokenizer, request, model, prompt, limit, form, tools)


def _check_stream(request: CompletionRequest | ChatRequest) -> None:
    if request.stream and request.wants_log_probs:
        raise RequestRefused("logprobs: a stream of this server has none; ask without stream", "logprobs")


def _chat_prompt(
    tokenizer: PreTrainedTokenizerBase, request: ChatRequest, tools: Sequence[ToolSchema]
) -> list[int]:
    if not tokenizer.chat_template:
        raise RequestRefused("the model has no chat template: use /v1/completions", "messages")
    if own := sorted(_OWN_OPTIONS & request.chat_template_kwargs.keys()):
        raise RequestRefused(f"chat_template_kwargs: {own[0]} is the server's to set", "chat_template_kwargs")
    options = request.chat_template_kwargs
    try:
        messages = [plain_message(message.for_prompt()) for message in request.messages]
        prompt = render_prompt_ids(tokenizer, messages, tools or None, **options)
        if tools and prompt == render_prompt_ids(tokenizer, messages, None, **options):
            raise RequestRefused("tools: the model's chat template does not show tools to the model", "tools")
    except (TemplateError, TypeError) as error:  # of templates: raise_exception, None + text
        raise RequestRefused(
            f"messages: the model's chat template refuses them: {error}", "messages"
        ) from error
    return prompt


def heard(
    text: str, tools: Sequence[ToolSchema], form: str, opened: str = ""
) -> tuple[str | None, tuple[Call, ...]]:
    """A turn's text, None for calls alone, and its calls. The prompt `opened` its thinking."""
    calls = parse_calls(opened + text, tools, form) if tools else ()
    if not calls or any(call.name is None or call.arguments is None for call in calls):
        return text, ()
    return outside_calls(opened + text, form)[len(opened) :].rstrip() or None, calls


def stop_checker(tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> Callable[[list[int]], bool] | None:
    """A check whether a stop string has just appeared, or None without stop strings."""
    if not stops:
        return None
    # A new match ends in the newest id, and an id has at least one byte, so these ids are enough.
    window = max(len(stop.encode()) for stop in stops) + 1

    def stopped(token_ids: list[int]) -> bool:
        text = decode(tokenizer, token_ids[-window:])
        return any(stop in text for stop in stops)

    return stopped


def tool_call(call: Call) -> dict[str, Any]:
    """A call in OpenAI's form, with a new id."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
