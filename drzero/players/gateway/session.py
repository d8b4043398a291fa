"""One episode's calls of its model, as sampled. A call that extends an earlier one continues its ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from drzero.ops.openai_http import RequestRefused
from environments.conversation import Message
from environments.fault import one_line
from verl_ext.apis.turn import Answer, Asked
from verl_ext.engine.api_answers import heard
from verl_ext.episodes import Answered, EpisodeLimits, Model
from verl_ext.method.chat import next_turn_ids, opened_thinking, render_prompt_ids, turn_text

_LONGEST_TOKEN = 128  # characters. Vocabularies have so many blanks as one token


@dataclass
class ModelCall(Answered):
    """One answered request."""

    number: int
    asked: Asked
    answer: Answer
    extends: int | None  # the number of the call whose conversation it continues


@dataclass
class AgentSession:
    """The calls of one episode. Closed with it."""

    model: Model
    limits: EpisodeLimits
    max_calls: int
    calls: list[ModelCall] = field(default_factory=list)
    failure: Exception | None = None  # of the model's engine or server
    fault: str | None = None  # what the agent did wrong with its model, in one line
    out_of_room: bool = False
    closed: bool = False
    _begun: int = 0

    async def ask(self, asked: Asked) -> Answer:
        """Sample the next turn of these messages. Raises RequestRefused."""
        self._check_open()
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise RequestRefused(f"max_tokens: an answer has at least one token, not {asked.max_tokens}")
        earlier = self._continued(asked)
        prompt_ids = self._prompt(asked, earlier)
        room = self._room(asked, prompt_ids, earlier)
        try:
            sampled = await self.model.sample(prompt_ids, room)
        # Any error of an engine or server. The player raises it once the agent has ended.
        except Exception as error:
            self.failure = error
            raise RequestRefused(f"the model failed: {type(error).__name__}") from error
        if self.closed:
            raise RequestRefused("the episode has ended", status=410)
        tokenizer, form = self.model.tokenizer, self.limits.call_form
        said = turn_text(tokenizer, sampled.ids)
        text, calls = heard(said, asked.tools, form, opened_thinking(tokenizer, prompt_ids))
        extends = earlier.number if earlier else None
        number = len(self.calls)
        answer = Answer(str(number), text, calls, len(prompt_ids), sampled.ids, sampled.truncated)
        self.calls.append(ModelCall(prompt_ids, sampled, number, asked, answer, extends))
        return answer

    def count(self, asked: Asked) -> int:
        """The tokens of a prompt. Raises RequestRefused."""
        return len(self._prompt(asked, self._continued(asked)))

    def _check_open(self) -> None:
        if self.closed:
            raise RequestRefused("the episode has ended", status=410)
        self._begun += 1
        if self._begun > self.max_calls:
            self.fault = f"it called the model more than {self.max_calls} times (environment.max_turns)"
            raise RequestRefused(self.fault, status=429)

    def _continued(self, asked: Asked) -> ModelCall | None:
        """The latest call whose messages and answer these messages begin with, and go on."""
        for call in reversed(self.calls):
            told = len(call.asked.messages)
            if (
                len(asked.messages) > told + 1
                and asked.tools == call.asked.tools
                and asked.messages[:told] == call.asked.messages
                and _is_answer(asked.messages[told], call)
            ):
                return call
        return None

    def _prompt(self, asked: Asked, earlier: ModelCall | None) -> list[int]:
        tokenizer = self.model.tokenizer
        added = asked.messages[len(earlier.asked.messages) + 1 :] if earlier else asked.messages
        self._check_length(added, earlier)
        try:
            if earlier is None:
                return render_prompt_ids(tokenizer, asked.messages, asked.tools or None)
            return earlier.known + next_turn_ids(tokenizer, earlier.sampled.ids, added)
        # A template is code that takes any message and tool.
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise RequestRefused(
                f"the chat template does not take these messages: {one_line(error)}"
            ) from error

    def _check_length(self, added: Sequence[Message], earlier: ModelCall | None) -> None:
        """Refuse messages that cannot fit before they become tokens. All episodes would wait for that."""
        key, limit = "data.max_prompt_length", self.limits.prompt_tokens
        if earlier is not None:
            key, limit = "data.max_response_length", self.limits.response_tokens
        characters = sum(len(message["content"]) for message in added)
        if characters <= limit * _LONGEST_TOKEN:
            return
        more = f"{characters} characters, more than the tokens of {key}={limit} have"
        if earlier is None:
            self.fault = f"its first messages are {more}"
        else:
            self.out_of_room = True
        raise RequestRefused(f"maximum context length: {more}")

    def _room(self, asked: Asked, prompt_ids: Sequence[int], earlier: ModelCall | None) -> int:
        """How many tokens the answer may have. Raises RequestRefused if there is no room."""
        first = prompt_ids
        while earlier is not None:
            first = earlier.prompt_ids
            earlier = None if earlier.extends is None else self.calls[earlier.extends]
        most = asked.max_tokens or self.limits.tokens_per_turn
        left = self.limits.response_tokens - (len(prompt_ids) - len(first))
        room = min(most, self.limits.tokens_per_turn, left)
        key, limit = "data.max_prompt_length", self.limits.prompt_tokens
        if len(first) > limit:
            self.fault = f"its first messages are {len(first)} tokens, more than {key}={limit}"
            raise RequestRefused(f"maximum context length: {self.fault}")
        if room <= 0:
            self.out_of_room = True
            raise RequestRefused(f"maximum context length: no room is left after {len(prompt_ids)} tokens")
        return room


def _is_answer(message: Message, call: ModelCall) -> bool:
    """Whether a client sends back what it heard. Some trim the text, and some write None for none."""
    if message["role"] != "assistant":
        return False
    sent = [_name_and_arguments(one["function"]) for one in message.get("tool_calls") or ()]
    made = [(one.name, dict(one.arguments or {})) for one in call.answer.calls]
    return (message.get("content") or "").strip() == (call.answer.text or "").strip() and sent == made


def _name_and_arguments(function: Mapping[str, Any]) -> tuple[Any, Any]:
    return function["name"], function["arguments"]
