"""Markdown as blocks, by markdown-it-py, with their places in the text.

for token, start, end in blocks("# Orrin\\n\\nA town.\\n"): ...
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

PARSED = 4_000_000  # Most characters of a text that are parsed
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
# Inline markup, such as emphasis, ends no block. Skipping it saves three quarters of the time.
_parse = MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"]).parse


class Block(NamedTuple):
    """A markdown-it token, and its lines: from the character `start` to before `end`."""

    token: Token
    start: int
    end: int


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of the first `PARSED` characters in order, outer ones first."""
    text = text[:PARSED]
    lines = [match.start() for match in _LINE.finditer(text)]

    def offset(line: int) -> int:
        return lines[line] if line < len(lines) else len(text)

    for token in _parse(text):
        if token.map is not None:
            yield Block(token, *map(offset, token.map))
