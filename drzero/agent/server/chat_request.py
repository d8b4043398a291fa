"""A chat's request: the question, the exchanges before it, or a front end's own task.

Fields that only steer sampling are ignored: the agent answers greedily, as in its evaluation. What would
change the form of the answer is refused by name.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drzero.agent.earlier import EXCHANGES, Exchange
from drzero.agent.server.chat_text import answer_in
from drzero.ops.openai_http import RequestRefused, only, without_null
from verl_ext.method.prompts import Message

_MOST_MESSAGES = 2000
_MOST_CHARACTERS = 256 << 10  # to turn into tokens, for which everybody waits
_READ_CHARACTERS = 4000  # of instructions, for signs of a task
_EXCHANGE = ("user", "assistant")
_TASK = re.compile(
    # Open WebUI: titles, tags, follow-ups, queries, completions; also a question that brings its passages.
    r"^[ \t]*###\s*Task:"
    r"|\A\s*Your task is to reflect the speaker's likely facial expression"
    r"|\A\s*You have been provided with a set of responses from various models"
    # LibreChat, n8n and others: a title for this conversation, tags for the chat.
    r"|\b(?:generate|create|provide|give|write|suggest|find|detect)\b[^.?!\n]{0,150}"
    r"\b(?:title|tags|name)\s+(?:for|summari[sz]ing)\b[^.?!\n]{0,40}\b(?:conversation|chat)\b"
    r"|\b(?:generate|create|provide|give|write|suggest|summari[sz]e)\b[^.?!\n]{0,100}"
    r"\b(?:conversation|chat)(?: history)?(?: titles?|s? into an? (?:\S+ )?title)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""Requests that a front end makes for itself. A search for one would cost more than the question."""


def too_long() -> RequestRefused:
    """The refusal of messages that no context takes."""
    why = "messages: they leave no room for an answer in the model's context: shorten them"
    return RequestRefused(why, "messages", "context_length_exceeded")


class _Said(BaseModel):
    model_config = ConfigDict(extra="ignore")
    _present = model_validator(mode="before")(without_null)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] = ""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(str(part["text"]) for part in self.content if isinstance(part.get("text"), str))

    @property
    def other_parts(self) -> list[str]:
        """The kinds of parts that are no text."""
        parts = [] if isinstance(self.content, str) else self.content
        return [str(part.get("type")) for part in parts if not isinstance(part.get("text"), str)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    _present = model_validator(mode="before")(without_null)
    include_usage: bool = False


class ChatRequest(BaseModel):
    """`/v1/chat/completions`. Tools that a client sends along are ignored: the agent has its search."""

    model_config = ConfigDict(extra="ignore")
    _present = model_validator(mode="before")(without_null)
    model: str | None = None
    messages: list[_Said] = Field(min_length=1, max_length=_MOST_MESSAGES)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: Annotated[Any, only(1)] = 1
    logprobs: Annotated[Any, only(False)] = False
    top_logprobs: Annotated[Any, only(0)] = 0
    tool_choice: Annotated[Any, only("auto", "none")] = "auto"
    response_format: Annotated[Any, only({"type": "text"})] = {"type": "text"}
    modalities: Annotated[Any, only(["text"])] = ["text"]

    @property
    def has_system_prompt(self) -> bool:
        """Whether the client sent its own instructions."""
        return any(said.role in ("system", "developer") for said in self.messages)

    @property
    def is_task(self) -> bool:
        """Whether a front end asks for a title or the like."""
        instructions = (said.text for said in self.messages if said.role in ("system", "developer"))
        texts = "\n".join(instructions), self._last.text
        return any(_TASK.search(text[:_READ_CHARACTERS]) for text in texts)

    def plain(self) -> list[Message]:
        """The messages for a model without tools."""
        self._check(self.messages)
        roles = {"developer": "system", "tool": "user", "function": "user"}
        return [{"role": roles.get(said.role, said.role), "content": said.text} for said in self.messages]

    def question(self) -> tuple[str, list[Exchange]]:
        """The last message, and the answered questions before it. Raises RequestRefused."""
        self._check(self.messages[-1:])
        talk = [said for said in self.messages[:-1] if said.role in ("user", "assistant")]
        pairs = [(one, other) for one, other in pairwise(talk) if (one.role, other.role) == _EXCHANGE]
        earlier = [(asked.text, answer_in(said.text)) for asked, said in pairs[-EXCHANGES:]]
        return self._last.text.strip(), [exchange for exchange in earlier if all(exchange)]

    @property
    def _last(self) -> _Said:
        return self.messages[-1]

    def _check(self, read: Sequence[_Said]) -> None:
        if sum(len(said.text) for said in read) > _MOST_CHARACTERS:
            raise too_long()
        if self._last.role != "user":
            why = f"the last message is the {self._last.role}'s, not the user's question"
            raise RequestRefused(f"messages: {why}", "messages")
        if others := self._last.other_parts:
            why = f"this agent reads text alone, and the question has a part of type {others[0]!r}"
            raise RequestRefused(f"messages: {why}: leave it out", "messages", "unsupported_value")
        if not self._last.text.strip():
            raise RequestRefused("messages: the question is empty", "messages")
