"""A run's page as a browser sees it."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from drzero.runs.report.write import write_report


class Page(HTMLParser):
    """Its text, elements, links and script blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.links: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.shown: list[str] = []
        self._in: str | None = None
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.shown).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append(tag)
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        if tag in ("script", "style"):
            self._in = tag
        if tag == "script":
            self.scripts.append((given.get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._in is None:
            self.shown.append(data)

    def blocks(self, kind: str | None) -> list[str]:
        return [text for of, text in self.scripts if of == kind]

    @property
    def data(self) -> dict[str, Any]:
        """The block that the page's script reads."""
        (block,) = self.blocks("application/json")
        return dict(json.loads(block))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.data["columns"], row, strict=False)) for row in self.data["rows"]]

    @property
    def conversations(self) -> list[str]:
        """The HTML of every conversation."""
        return [one for pack in self.blocks("text/plain") for one in unpacked(pack)]


def unpacked(pack: str) -> list[str]:
    return list(json.loads(gzip.decompress(base64.b64decode(pack))))


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))
