"""A conversation as it happened. veRL's extra fields carry its JSON form into the dumps (docs/dumps.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.call import Call

Message = Mapping[str, Any]  # `role` (system, user or tool) and `content`, a text


def tool_message(text: str) -> Message:
    """The answer to a call."""
    return {"role": "tool", "content": text}


def user_message(text: str) -> Message:
    """A message of the environment."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Turn:
    """One assistant turn and the environment's reply."""

    text: str  # without special tokens
    calls: tuple[Call, ...] = ()
    truncated: bool = False  # cut off by the token limit
    answers: tuple[Message, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: each call with its answer, and other messages as `observation`."""
        told = [str(message["content"]) for message in self.answers if message["role"] == "tool"]
        said = [str(message["content"]) for message in self.answers if message["role"] != "tool"]
        return {
            "text": self.text,
            "calls": [
                {
                    **{name: getattr(call, name) for name in ("raw", "name", "error", "undeclared")},
                    "arguments": None if call.arguments is None else dict(call.arguments),
                    "queries": None,
                    "failed": False,
                    "response": told[index] if index < len(told) else None,
                }
                for index, call in enumerate(self.calls)
            ],
            "truncated": self.truncated,
            "observation": "\n".join(said) if said else None,
        }


@dataclass(frozen=True)
class Conversation:
    """The opening messages and turns of one episode."""

    opening: tuple[Message, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call of every turn."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def final_text(self) -> str:
        """The last turn's text, or an empty one."""
        return self.turns[-1].text if self.turns else ""

    @property
    def searches(self) -> tuple[Call, ...]:
        """Empty, as for `failed_calls`. A search trajectory has its answered searches here."""
        return ()

    failed_calls = searches  # empty, since a failure fails the whole episode

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        shown = {
            "opening": [dict(message) for message in self.opening],
            "turns": [turn.to_dict() for turn in self.turns],
        }
        return dict(json.loads(json.dumps(shown, default=str)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conversation:
        """Rebuild it from its JSON form. Raises KeyError for a missing field."""
        return cls(tuple(data["opening"]), tuple(_turn(turn) for turn in data["turns"]))


def _turn(data: Mapping[str, Any]) -> Turn:
    calls: Sequence[Mapping[str, Any]] = data["calls"]
    answers = [tool_message(call["response"]) for call in calls if call["response"] is not None]
    if data["observation"] is not None:
        answers.append(user_message(data["observation"]))
    named = ("raw", "name", "arguments", "error", "undeclared")
    parsed = tuple(Call(**{name: call[name] for name in named}) for call in calls)
    return Turn(data["text"], parsed, data["truncated"], tuple(answers))
