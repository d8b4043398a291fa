"""Markdown as its blocks, and where in the text each of them is.

    for token, start, end in blocks("# Orrin\\n\\nA town.\\n"): ...

markdown-it-py parses it: what is a fence and what a heading is not decided here.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

PARSED = 4_000_000
"""Characters of a text that are parsed at most."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
# What is within a line, as emphasis, ends no block: leaving it unparsed takes a quarter of the time.
_parse = MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"]).parse


class Block(NamedTuple):
    """A token of markdown-it, and its lines: from the character `start` to before `end`."""

    token: Token
    start: int
    end: int


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of the first `PARSED` characters in order, each before those inside of it."""
    text = text[:PARSED]
    lines = [match.start() for match in _LINE.finditer(text)]

    def offset(line: int) -> int:
        return lines[line] if line < len(lines) else len(text)

    for token in _parse(text):
        if token.map is not None:
            yield Block(token, *map(offset, token.map))
