"""Whether a chat template lets a conversation grow: nothing that the model has read may change later."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from environments.call import tool_name
from verl_ext.method.chat import (
    decode,
    next_turn_ids,
    opened_thinking,
    render_prompt_ids,
    tool_turn_ids,
    turn_end_id,
)

CHANGE_TEMPLATE = (
    "choose an instruction-tuned model of another family, such as Qwen2.5-Instruct, or correct "
    "chat_template.jinja in a copy of the model's folder"
)
Messages = Sequence[Mapping[str, Any]]
_SHOWN = 12  # ids on both sides of a difference


def growth_fault(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """Where the whole conversation, rendered anew, differs from its turns joined one by one, or None.

    It may differ inside an assistant's turn, whose ids stay as they were sampled: a template may leave out
    earlier thinking, strip blanks, or write a call in another way.
    """
    joined: list[tuple[range, list[int]]] = []
    for new in _between_turns(messages):
        try:
            fresh = render_prompt_ids(tokenizer, messages[: new.stop], tools)
            ids = fresh
            if new.start > 0:
                answers = messages[new.start : new.stop]
                ids = next_turn_ids(tokenizer, [turn_end_id(tokenizer)], answers)
            joined.append((new, ids))
        except (TemplateError, TypeError, ValueError) as reason:  # of templates: raise_exception, None + text
            return f"its chat template does not take {_named(messages, new)} ({reason})"
        if fault := _difference(tokenizer, messages, joined, fresh):
            return f"{fault}, once {_named(messages, new)} follows"
    return None


def tools_fault(tokenizer: Any, opening: Messages, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a conversation cannot go on from `opening` with two calls of a tool, or None.

    Raises ValueError or the template's own error.
    """
    if render_prompt_ids(tokenizer, opening, tools) == render_prompt_ids(tokenizer, opening, None):
        return "its chat template does not render tools"
    if tool_turn_ids(tokenizer, [], ["one"]) == tool_turn_ids(tokenizer, [], ["two"]):
        return "its chat template does not render tool responses"
    function = {"name": tool_name(tools[0]), "arguments": {"query": "town"}}
    calls = [{"type": "function", "function": function}]
    called: Messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    answered = [*called, {"role": "tool", "content": "text"}]
    return growth_fault(tokenizer, [*opening, *answered, *answered], tools)


def _between_turns(messages: Messages) -> list[range]:
    """Ranges of indices: the opening, then the messages after each assistant turn."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [0, *(turn + 1 for turn in turns)]
    places = map(range, starts, [*turns, len(messages)])
    return [new for new in places if new or new.start == 0]


def _difference(
    tokenizer: Any, messages: Messages, joined: Sequence[tuple[range, list[int]]], fresh: list[int]
) -> str | None:
    end, at, last = turn_end_id(tokenizer), 0, len(joined) - 1
    for number, (places, ids) in enumerate(joined):
        sure, begun = (len(ids), "") if number == last else _before_turn(tokenizer, ids)
        found = fresh[at:] if number == last else fresh[at : at + sure]
        after = decode(tokenizer, fresh[at + sure : at + len(ids) + _SHOWN])
        if found != ids[:sure] or not after.startswith(begun):
            return _shown(tokenizer, _named(messages, places), ids, fresh[at:])
        at += sure
        if number < last and end in fresh[at:]:
            at = fresh.index(end, at) + 1
    return None


def _before_turn(tokenizer: Any, ids: list[int]) -> tuple[int, str]:
    """How many ids of a prompt stay the same whatever the turn is, and the text after them, without thinking.

    Text after the last special token can be tokenized in another way together with the turn's text.
    """
    opened, kept = opened_thinking(tokenizer, ids), len(ids)
    while opened and opened.endswith(decode(tokenizer, ids[kept - 1 :])):
        kept -= 1
    special = set(tokenizer.get_added_vocab().values())
    sure = next((place for place in range(kept, 0, -1) if ids[place - 1] in special), 0)
    return sure, decode(tokenizer, ids[sure:kept])


def _shown(tokenizer: Any, what: str, ids: list[int], found: list[int]) -> str:
    pairs = enumerate(zip(ids, found, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(ids), len(found)))
    before, after = (decode(tokenizer, side[max(same - 2, 0) : same + _SHOWN]) for side in (ids, found))
    return f"its chat template writes {what} as {after!r} in place of {before!r}"


def _named(messages: Messages, places: range) -> str:
    roles = ", ".join(str(messages[place]["role"]) for place in places)
    first, last = places[0] + 1, places[-1] + 1
    return f"message {first} ({roles})" if first == last else f"messages {first}–{last} ({roles})"
