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


def spoken_spans(text: str) -> list[tuple[int, int]]:
    """Where the parts outside the thinking begin and end. The last one, maybe empty, follows all thinking."""
    spans, start, at = [], 0, 0
    while tag := _TAG.search(text, at):
        at = tag.end()
        if tag[0] == CALL:
            at = _end_of_call(text, at)
            continue
        if tag[0] == THINK:
            spans.append((start, tag.start()))
            end = text.find(THINK_END, at)
            if end < 0:
                return [*spans, (len(text), len(text))]
            at = end + len(THINK_END)
        start = at
    return [*spans, (start, len(text))]


def spoken(text: str) -> list[str]:
    """The parts of a turn outside its thinking."""
    return [text[start:end] for start, end in spoken_spans(text)]


def after_thinking(text: str) -> str:
    """The part of a turn that follows all its thinking: its answer, if it gives one."""
    return spoken(text)[-1]


def thinking(text: str) -> tuple[str, bool]:
    """The thinking of a turn, and whether it has ended."""
    spans = spoken_spans(text)
    ends = [0, *(end for _, end in spans)]
    thoughts = [text[end:start] for end, (start, _) in zip(ends, spans, strict=False)]
    plain = (thought.strip().removeprefix(THINK).removesuffix(THINK_END).strip() for thought in thoughts)
    return "\n".join(filter(None, plain)), not thoughts[-1] or thoughts[-1].endswith(THINK_END)


def tagged_calls(said: str) -> list[str]:
    """The text of each closed `<tool_call>` in one spoken part."""
    ended = said.split(CALL_END)[:-1]
    return [before.partition(CALL)[2] for before in ended if CALL in before]


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
