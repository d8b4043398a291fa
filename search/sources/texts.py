"""Files with one document each: plain text, Markdown, html and reStructuredText.

    title, text, is_markdown = read_document(SourceFile(Path("docs/guide.html"), "guide.html"), Hints())

The title is the text's own first heading, else the page's head or front matter, else the file's name.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from search.sources.files import COMPRESSED, Hints, SourceFile, read_text
from search.sources.rst import rst_to_html

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?\r?\n)?---[ \t]*(\r?\n|\Z)", re.DOTALL)
# Parts of a page without text: menus, scripts, links to headings.
_NO_TEXT = (
    "script,style,template,noscript,svg,nav,header,footer,aside:not(.admonition),form,button,.headerlink,"
    ".sidebar"
)
_LABEL = ".admonition-title"  # "Note" above a note, a box on the page, becomes a line
_MAIN = ("main", "[role=main]", "article", "body")
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


def read_document(file: SourceFile, hints: Hints) -> tuple[str, str, bool]:
    """Return title, text and whether it is Markdown. Raises ValueError if the file cannot be read."""
    text = read_text(file.path, hints)
    name = PurePosixPath(file.id)
    stem = PurePosixPath(name.stem).stem if name.suffix.lower() in COMPRESSED else name.stem
    if file.kind == ".txt":
        return stem, text, False
    if file.kind in (".md", ".markdown"):
        title, text = _front_matter(text)
    elif file.kind == ".rst":
        title, text = from_html(rst_to_html(text))
    else:
        title, text = from_html(text)
    heading, rest = first_heading(text)
    return heading or title or stem, rest, True


def first_heading(text: str) -> tuple[str, str]:
    """Return a Markdown text's own heading, or "", and the text without a heading on its first line.

    The first counts, unless others of its level or above follow below the first level.
    """
    headings = _headings(text)
    if not headings:
        return "", text
    level, title, lines = headings[0]
    if level > 1 and any(other <= level for other, _, _ in headings[1:]):
        return "", text
    rest = text[lines.end :]
    is_first = not text[: lines.start].strip()
    return title, rest.lstrip("\r\n") if is_first and rest.strip() else text


def _headings(text: str) -> list[tuple[int, str, Block]]:
    """Level, words and lines of each top-level heading. A line of dashes may be a rule, so it makes none."""
    found: list[tuple[int, str, Block]] = []
    heading: Block | None = None
    for block in blocks(text):
        if block.token.type == "heading_open":
            heading = block if block.token.level == 0 and block.token.markup != "-" else None
        elif heading and block.token.type == "inline":
            if words := block.token.content.replace("\n", " "):
                found.append((int(heading.token.tag[1:]), words, heading))
            heading = None
    return found


def _front_matter(text: str) -> tuple[str, str]:
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return "", text
    try:
        said: Any = yaml.safe_load(matter[1] or "")
    except yaml.YAMLError:
        said = None
    if not isinstance(said, dict):  # just two rules
        return "", text
    return str(said.get("title") or ""), text[matter.end() :]


def from_html(text: str) -> tuple[str, str]:
    """Return a page's title, or "", and its main part as Markdown. Raises ValueError."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        # Invisible to a reader, or shown as words.
        strip=["a", "img", "b", "strong", "em", "i"],
    )
    try:
        page = BeautifulSoup(text, "html.parser")
        title = page.title.get_text() if page.title else ""
        main = next((found for part in _MAIN if (found := page.select_one(part))), page)
        for part in main.select(_NO_TEXT):
            part.decompose()
        for label in main.select(_LABEL):
            label.append(":")
        markdown = converter.convert_soup(main)
    except RecursionError as error:
        raise ValueError("html nested too deep") from error
    return " ".join(title.split()), re.sub(r"\n{3,}", "\n\n", str(markdown)).strip() + "\n"
