"""Files that are one document each: plain text, Markdown, html and reStructuredText.

    title, text, is_markdown = read_document(SourceFile(Path("docs/guide.html"), "guide.html"), used)

html and rst become Markdown, so that headings and code stay what they are: html by markdownify, of the page's
main part where it marks one; rst by docutils first (`search.sources.rst`). The title is the first heading,
unless it is only that of the first part of several; else what the head of the page or the front matter says,
else the file's name. A title on the first line is removed from the text.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import yaml

from search.sources.decoding import Encoding
from search.sources.files import COMPRESSED, SourceFile, read_text
from search.sources.markdown import Block, blocks
from search.sources.rst import rst_to_html

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?\r?\n)?---[ \t]*(\r?\n|\Z)", re.DOTALL)
# Parts of a page that are no text of it: menus, scripts, the signs that link to a heading.
_NO_TEXT = (
    "script,style,template,noscript,svg,nav,header,footer,aside:not(.admonition),form,button,.headerlink,"
    ".sidebar"
)
# "Note" above a note, which is a box on the page and a line here.
_LABEL = ".admonition-title"
_MAIN = ("main", "[role=main]", "article", "body")


def read_document(file: SourceFile, used: Callable[[Encoding], object]) -> tuple[str, str, bool]:
    """Return title, text and whether it is Markdown; raises ValueError for what cannot be read."""
    text = read_text(file.path, used)
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
    """Return the heading that a Markdown text has as a whole, empty for none, and the text without it.

    That is the first, unless more of its level or above follow below the first level: then it is that of a
    part. It stays in the text unless it is on the first line, and something follows.
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
    """Level, words and lines of each heading that is in nothing else.

    A line of dashes makes none: it is as often a rule, or the end of front matter that is no YAML.
    """
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
    """Return the title of a Markdown file's front matter, empty without one, and the text below it."""
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return "", text
    try:
        said: Any = yaml.safe_load(matter[1] or "")
    except yaml.YAMLError:
        said = None
    if not isinstance(said, dict):  # two rules with text between them
        return "", text
    return str(said.get("title") or ""), text[matter.end() :]


def from_html(text: str) -> tuple[str, str]:
    """Return a page's title, empty without one, and its main part as Markdown; raises ValueError."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        # What a reader does not see, or sees as words.
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
