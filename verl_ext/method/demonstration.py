"""A conversation to learn from, as the token ids that a rollout would have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from verl_ext.method.chat import next_turn_ids, opened_thinking, render_prompt_ids, turn_end_id
from verl_ext.method.prompts import Message
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA
from verl_ext.method.trajectory import Trajectory


@dataclass(frozen=True)
class Example:
    """One conversation's token ids. `own_T` marks the model's own tokens."""

    ids_T: list[int]
    own_T: list[bool]


def messages_of(prompt: Sequence[Message], trajectory: Trajectory) -> list[Message]:
    """The prompt and the trajectory's turns, with the response to each answered call."""
    messages = list(prompt)
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages += [{"role": "tool", "content": call.response or ""} for call in turn.calls]
    return messages


def encode(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None = (SEARCH_TOOL_SCHEMA,),
) -> Example:
    """Encode a conversation exactly as a rollout does: prompt, turns with their end token, responses."""
    parts = [list(part) for _, part in groupby(messages, lambda message: message["role"] == "assistant")]
    ids = render_prompt_ids(tokenizer, parts[0], list(tools) if tools else None)
    own, said = [False] * len(ids), list[int]()
    for part in parts[1:]:
        is_own = part[0]["role"] == "assistant"
        if is_own:
            # What the template has opened already belongs to the turn's text, but not to its tokens.
            text = _after(opened_thinking(tokenizer, ids), part[0]["content"])
            said = [*tokenizer.encode(text, add_special_tokens=False), turn_end_id(tokenizer)]
        new = said if is_own else next_turn_ids(tokenizer, said, part)
        ids += new
        own += [is_own] * len(new)
    return Example(ids, own)


def _after(opened: str, text: str) -> str:
    """The text without the tags that a prompt ends with. Another model writes other blanks after them."""
    if opened and not text.startswith(opened) and text.startswith(opened.strip()):
        return text.removeprefix(opened.strip()).lstrip()
    return text.removeprefix(opened)
