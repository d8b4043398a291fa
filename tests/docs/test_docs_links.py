"""Every link of the pages leads somewhere and says where; and the site's navigation has all pages.

The pages are parsed as a code host parses them (CommonMark with tables). `make docs` checks the site's own.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    # A folder with a dot is no room of the house: pytest leaves .pytest_cache, with a README of its own.
    *sorted(ROOT.glob("[!.]*/README.md")),
    *sorted(ROOT.glob("drzero/policies/*/README.md")),
]


def tokens(text: str) -> Iterator[Token]:
    """All tokens of a page, those within paragraphs too."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures."""
    found = ((token.attrs.get("href") or token.attrs.get("src")) for token in tokens(text))
    return [str(target) for target in found if target]


def anchors(text: str) -> set[str]:
    """The anchors that a code host gives a page's headings: a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for opening, inline in pairwise(tokens(text)):
        if opening.type != "heading_open":
            continue
        words = "".join(part.content for part in inline.children or ())
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(slug if not seen[slug] else f"{slug}-{seen[slug]}")
        seen[slug] += 1
    return found


def broken(page: Path, text: str) -> list[str]:
    """The page's relative links that lead nowhere."""
    found = []
    for link in links(text):
        path, _, anchor = unquote(link).partition("#")
        if ":" in path.partition("/")[0]:
            continue
        target = page.parent / path
        if path and not target.exists():
            found.append(link)
        elif anchor:
            aimed = target.read_text(encoding="utf-8") if path else text
            found += [link] * (anchor not in anchors(aimed))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](none.md)", ["none.md"]),
        ("![a](none.png)", ["none.png"]),
        ("| [a](none.md) |\n|---|", ["none.md"]),
        ("# One two\n[a](#one-two) [b](#three)", ["#three"]),
        ("# A `b`?\n# A `b`?\n[a](#a-b) [b](#a-b-1) [c](#a-b-2)", ["#a-b-2"]),
        ("[a](method.md#no-such-heading)", ["method.md#no-such-heading"]),
        ("[a](method.md) [b](../README.md) [c](https://example.org/none) `[d](none.md)`", []),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text, found):
    assert broken(ROOT / "docs" / "page.md", text) == found


def wordless(text: str) -> list[str]:
    """The texts of a page's links that do not say where they lead: a file's name, or words such as "here"."""
    found = re.findall(r"(?<!!)\[([^][]*)\]\([^)]*\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    bare = r"[\w./-]+\.(md|py|yaml|toml)|https?://.*|here|this|link|page|see|this page|"
    return [words for words in found if re.fullmatch(bare, words.strip("`* "), re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_text_of_every_link_says_where_it_leads(page):
    assert wordless(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see [gpu.md](gpu.md) and [`docs/gpu.md`](docs/gpu.md)", ["gpu.md", "`docs/gpu.md`"]),
        ("[here](gpu.md), [This page](gpu.md), [](gpu.md)", ["here", "This page", ""]),
        (
            "[bench/x.py](../bench/x.py) [One GPU](gpu.md) [`hop_ratio`](config.md#every-stage)",
            ["bench/x.py"],
        ),
        ("![here](a.png) `[here]` (gpu.md)\n```\n[here](gpu.md)\n```", []),
    ],
)
def test_a_link_that_only_names_a_file_is_found(text, found):
    assert wordless(text) == found


def test_every_group_of_keys_is_linked_from_a_page_that_uses_it():
    groups = anchors((ROOT / "docs" / "config.md").read_text(encoding="utf-8")) - {"the-keys-of-a-config"}
    others = " ".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "config.md")
    assert groups <= set(re.findall(r"\(config\.md#([\w-]+)\)", others))


def navigation(entry: Any) -> Iterator[str]:
    """The paths in a piece of zensical.toml's `nav`."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from (path for part in entry.values() for path in navigation(part))
    else:
        yield from (path for part in entry for path in navigation(part))


def test_the_sites_navigation_has_every_page_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert Counter(navigation(nav)) == Counter(str(page.relative_to(ROOT)) for page in PAGES)
