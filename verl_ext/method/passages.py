"""Search results as the model sees them: each cut to a fair share of a hard limit in characters.

Every line of a passage begins with `[`, and no other line does. So the text can be read back without doubt.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

RESPONSE_LIMIT = 2048  # characters in one tool response
_MARK = "["
_NOTHING = "No results."
# The beginnings of ChatML's and Llama's, Gemma's, then Mistral's.
_CONTROL = re.compile(
    r"<(?=\||(?:start|end)_of_turn>|[be]os>|/?s>)"
    r"|\[(?=/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|THINK)\])"
)


def format_passages(
    queries: Sequence[str], results: Sequence[Sequence[Mapping[str, Any]]], limit: int = RESPONSE_LIMIT
) -> str:
    """Numbered passages, one a line, at most `limit` characters in total.

    `results` has the passages of each query (`title`, `text`, and `contents` in place of an empty `text`).
    """
    if len(queries) != len(results):
        raise ValueError(
            f"{len(queries)} queries but {len(results)} result lists: the search service broke its contract"
        )
    lines: list[str] = []
    number = 0
    for query, passages in zip(queries, results, strict=True):
        if len(queries) > 1:
            shown = _one_line(query)
            lines.append(_cut(f"Query {shown}" if shown.startswith(_MARK) else shown, 60) + ":")
        if not passages:
            lines.append(_NOTHING)
        for passage in passages:
            number += 1
            lines.append(f"[{number}] {_passage_line(passage)}")
    room = limit - (len(lines) - 1)  # for the line breaks
    share = _fair_share([len(line) for line in lines], max(room, 0))
    # The slice matters only if the limit has no room for one character a line.
    return "\n".join(_cut(line, share) for line in lines)[:limit]


def shown_passages(response: str) -> list[str]:
    """The passages of a formatted response, without the queries, which are the model's own words."""
    return [passage for line in response.split("\n") if (passage := passage_of(line))]


def passage_of(line: str) -> str:
    """The passage of a response's line without its number, or "" for any other line."""
    return line.partition("] ")[2] if line.startswith(_MARK) else ""


def passages_by_query(queries: Sequence[str], response: str) -> list[tuple[str, list[str]]]:
    """Each query with the passages that a formatted response shows for it."""
    if len(queries) == 1:
        return [(queries[0], shown_passages(response))]
    passages: list[list[str]] = []
    for line in response.split("\n"):
        if not line.startswith(_MARK):
            if line != _NOTHING:
                passages.append([])
        elif passages and (passage := passage_of(line)):
            passages[-1].append(passage)
    return list(zip(queries, passages, strict=False))  # the limit may have cut the last ones


def defuse(text: str) -> str:
    """The text without control tokens of any family: `<|im_end|>` in a document would end the turn."""
    return _CONTROL.sub(r"\g<0> ", text)


def _passage_line(passage: Mapping[str, Any]) -> str:
    title, text = _one_line(passage.get("title", "")), _one_line(passage.get("text", ""))
    if not text:
        return _one_line(passage.get("contents", "")) or title
    return f"{title}: {text}" if title else text


def _one_line(text: str) -> str:
    return defuse(" ".join(text.split()))


def _fair_share(lengths: Sequence[int], room: int) -> int:
    for done, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - done)
        if length > share:
            return share
        room -= length
    return max(lengths, default=0)


def _cut(text: str, length: int) -> str:
    """Cut between words if possible."""
    if len(text) <= length:
        return text
    head = text[: max(length - 1, 0)]
    space = head.rfind(" ")
    return (head[:space] if space > length // 2 else head) + "…"[:length]
