"""An answer as the text of a chat, with its sources, and back again.

Front ends show the text as Markdown: text of documents is escaped, and images and HTML in the answer too.
"""

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

from drzero.agent.answer import Answer, Source, progress_lines
from drzero.ops.notices import plain

_LISTED = 5
_SHOWN_CHARACTERS = 400
_READ_CHARACTERS = 16_000
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&$])")
# A front end would load an image at once, and a document can make the model write its address.
_LOADED = re.compile(r"!(?=\[)|<")
_HEADINGS = {"supported": "Sources", "unsupported": "What it read", "none": "What it read"}
_ADDED = re.compile(
    r"(?:\A|\n\n)(?:\*No passage|\*The agent gave no answer|\*\*(?:Sources|What it read)\*\*\n)"
)
_OF_FRONT_ENDS = re.compile(r"<details\b.*?</details>|<think>.*?</think>", re.DOTALL)


def composed(
    answer: Answer, address: Callable[[Source], str], *, lists_sources: bool
) -> tuple[str, list[dict[str, Any]]]:
    """The text, and an annotation for each source that holds the answer."""
    said = answer.text or ""
    if lists_sources:
        said = _LOADED.sub(lambda found: f"&#{ord(found[0])};", said)
    text = "\n\n".join(filter(None, [said, answer.note and f"*{answer.note}*"]))
    evidence = [source for source in answer.sources if source.evidence]
    spans = [(0, len(said))] * len(evidence)
    if lists_sources and answer.sources:
        text += f"\n\n**{_HEADINGS[answer.state]}**\n"
        spans = []
        for number, source in enumerate((evidence or answer.sources)[:_LISTED], 1):
            entry = f"\n{number}. [{escaped(source.name)}]({address(source)})"
            spans.append((len(text) + entry.index("["), len(text) + len(entry)))
            text += entry + (f": {escaped(source.evidence)}" if source.evidence else "")
    cited = zip(evidence[:_LISTED], spans, strict=False)
    return text, [_annotation(source, address(source), *span) for source, span in cited]


def answer_in(text: str) -> str:
    """The answer in an assistant's message, without what `composed` and front ends add."""
    text = _OF_FRONT_ENDS.sub("", text[:_READ_CHARACTERS])
    added = _ADDED.search(text)
    return html.unescape(text[: added.start() if added else None]).strip()


def thought(queries: Sequence[str], found: Sequence[Source] | None) -> str:
    """A search in progress, in Markdown."""
    lines = progress_lines(queries, found, escaped)
    return "".join(f"{line[0].upper()}{line[1:]}\n\n" for line in lines)


def escaped(text: str) -> str:
    """A text in one line that Markdown shows as it is."""
    line = " ".join(plain(text).split())
    line = line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"
    return _SPECIAL.sub(r"\\\1", line)


def _annotation(source: Source, url: str, start: int, end: int) -> dict[str, Any]:
    place = {"url": url, "title": plain(source.title or source.id), "start_index": start, "end_index": end}
    return {"type": "url_citation", "url_citation": place}
