"""Files with one document each: plain text, Markdown, html and reStructuredText.

The title is the text's own first heading, else the page's head or front matter, else the file's name.
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from search.sources.files import COMPRESSED, Hints, SourceFile, read_text
from search.sources.rst import rst_to_html

if TYPE_CHECKING:
    from bs4 import Tag

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?\r?\n)?---[ \t]*(\r?\n|\Z)", re.DOTALL)
# Parts of a page without text: menus, scripts, links to headings.
_NO_TEXT = (
    "head,title,script,style,template,noscript,svg,nav,header,footer,aside:not(.admonition,.sidebar),form,button,dialog,"
    "input,[hidden],[role=navigation],[role=search],[role=banner],[role=contentinfo],"
    "[aria-label*=breadcrumb i]"
)
_HEADING_LINKS = ".headerlink,.hash-link,.header-anchor,.anchor-heading,.heading-anchor,a.anchor,a.mark"
# The same by the names that DocBook, Sphinx, MkDocs, Docusaurus, Hugo and others give them.
_FURNITURE = re.compile(
    r"(.*[-_])?(breadcrumbs?|toc|toctree|table-?of-?contents|menu|submenu|mainmenu|searchmenu|navbar|pager|pagination)"
    r"([-_].*)?|nav|(doc|page|pagi)-?nav|nav(header|footer|bar)|(sphinx)?sidebar|related|prev-next.*|skip-?(to|link).*|"
    r".*edit-(this-)?page|(post|page|article|td-page)-meta.*|.*last-?(modified|updated?|mod)|.*footer|md-source-file|"
    r"headerlink|(theme-doc-)?version-badge|toplang|bottomlang|quickview",
    re.IGNORECASE,
)
_HEADINGS = [f"h{level}" for level in range(1, 7)]
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
    from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # XHTML is read as HTML on purpose
            page = BeautifulSoup(text, "html.parser")
        title = " ".join(page.title.get_text().split()) if page.title else ""
        for part in page.select(_HEADING_LINKS):
            part.decompose()
        main = next((found for part in _MAIN if (found := page.select_one(part))), page)
        if heading := _own_heading(page, main, title):
            main.insert(0, heading.extract())
        _remove_furniture(main)
        for label in main.select(_LABEL):
            label.append(":")
        markdown = converter.convert_soup(main)
    except RecursionError as error:
        raise ValueError("html nested too deep") from error
    return title, re.sub(r"\n{3,}", "\n\n", str(markdown)).strip() + "\n"


def _own_heading(page: "Tag", main: "Tag", title: str) -> "Tag | None":
    """The page's own h1, if it is in a header or outside of the main part, where the site's name is too."""
    for heading in [*main.find_all("h1"), *page.find_all("h1")]:
        is_inside = main in heading.parents
        header = heading.find_parent("header")
        if is_inside and header is None:
            return None
        words = " ".join(heading.get_text().split())
        if words and (title.startswith(words) or (is_inside and main.name != "body")):
            return heading
    return None


def _remove_furniture(main: "Tag") -> None:
    """Remove menus, tables of contents and the like, but no text that is most of the page's."""
    for part in main.select(_NO_TEXT):
        part.decompose()
    whole = _letters(main)
    for part in main.find_all(True):
        if part.decomposed or part.name in ("html", "body", "h1", "h2"):
            continue
        names = [*part.get_attribute_list("class"), *part.get_attribute_list("id")]
        if not part.find("h1") and any(name and _FURNITURE.fullmatch(name) for name in names):
            size, linked = _letters(part), sum(map(_letters, part.find_all("a")))
            # DocBook's sidebars are boxes of text.
            is_text = 2 * linked <= size if "sidebar" in names else 2 * size > whole and 5 * linked < 4 * size
            if not is_text and size < _letters(main):
                part.decompose()
    headings = main.find_all(_HEADINGS)
    for links in main.find_all(["ul", "ol"]):
        targets = links.find_all("a")
        is_here = all(str(link.get("href", "")).startswith("#") for link in targets)
        if len(targets) > 1 and is_here and 5 * sum(map(_letters, targets)) > 4 * _letters(links):
            above = links.find_previous_sibling()
            if above in headings[1:]:  # "Contents"
                above.decompose()
            links.decompose()


def _letters(part: "Tag") -> int:
    return len("".join(part.get_text().split()))
