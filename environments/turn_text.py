"""The one reader of a model's turn: which parts of its text are thinking, and which calls it makes outside.

    after_thinking("<think>Orrin?</think>It is <answer>Vell</answer>")  # "It is <answer>Vell</answer>"

Thinking that has no end goes to the end of the turn. A lone `</think>` ends a thinking that began before.
"""

import json
import re
from typing import Any

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_TAG = re.compile("<think>|</think>|<tool_call>")


def turn_parts(text: str) -> list[tuple[str, str]]:
    """Each stretch of thinking, in its tags, with the text after it. The first may be empty."""
    parts, thought_at, said_at, at = [], 0, 0, 0
    while tag := _TAG.search(text, at):
        at = tag.end()
        if tag[0] == CALL:
            at = _end_of_call(text, at)
            continue
        if tag[0] == THINK:
            parts.append((text[thought_at:said_at], text[said_at : tag.start()]))
            thought_at, end = tag.start(), text.find(THINK_END, at)
            at = len(text) if end < 0 else end + len(THINK_END)
        said_at = at
    return [*parts, (text[thought_at:said_at], text[said_at:])]


def after_thinking(text: str) -> str:
    """The part of a turn that follows all its thinking: its answer, if it gives one."""
    return turn_parts(text)[-1][1]


def thinking(text: str) -> tuple[str, bool]:
    """The thinking of a turn, and whether it has ended."""
    thoughts = [thought for thought, _ in turn_parts(text)]
    plain = filter(None, map(without_tags, thoughts))
    return "\n".join(plain), not thoughts[-1] or thoughts[-1].endswith(THINK_END)


def without_tags(thought: str) -> str:
    """The text of one stretch of thinking."""
    return thought.strip().removeprefix(THINK).removesuffix(THINK_END).strip()


def tagged_calls(said: str) -> tuple[list[str], str]:
    """The text of each closed `<tool_call>` outside the thinking, and the text around them."""
    *ended, rest = said.split(CALL_END)
    cut = [before.partition(CALL) for before in ended]
    around = [before if tag else before + CALL_END for before, tag, _ in cut]
    return [call for _, tag, call in cut if tag], "".join([*around, rest])


def read_json(text: str) -> Any:
    """The value of a text of JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested deeper than Python's stack
        return None


def _end_of_call(text: str, start: int) -> int:
    """Where the call's text ends, in which tags are data. A mere mention of the tag ends at once."""
    end = text.find(CALL_END, start)
    if end < 0 or (text.find(THINK_END, start, end) >= 0 and read_json(text[start:end]) is None):
        return start
    return end
