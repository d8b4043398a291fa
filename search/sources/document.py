"""One document of a corpus: id, title, text, and its origin."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import NamedTuple


class Origin(NamedTuple):
    """Where something was read: a file, and in a table which line, row or record, counted from 1."""

    file: str
    unit: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.file} {self.unit} {self.number}" if self.unit else self.file


@dataclass(frozen=True)
class Document:
    """A document. Documents with different origins can be equal."""

    id: str
    title: str
    text: str
    markdown: bool = False
    """Whether a splitter should read its headings and fences."""
    origin: Origin = field(default=Origin(""), compare=False)

    def digest(self) -> bytes:
        """Return a hash of id, title, text and kind (32 bytes)."""
        parts: list[str | bool] = [self.id, self.title, self.text]
        return hashlib.sha256(json.dumps(parts + [True] * self.markdown).encode()).digest()

    def content(self) -> bytes:
        """Return a hash of title and text that ignores white space (16 bytes)."""
        words = " ".join(f"{self.title}\n{self.text}".split())
        return hashlib.sha256(words.encode()).digest()[:16]
