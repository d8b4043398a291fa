"""Repeated queries: a cache of answers, bounded in bytes.

    cache = ResultCache(max_bytes=256 << 20, size=size_of)

An answer depends on the collection's version, the model with its revision, the query (after `fold`, if the
model allows it) and topk. A server's collection and model never change, so a key holds the last two.
"""

import re
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

Answer = TypeVar("Answer")

_ENTRY_BYTES = 600
"""Memory of an entry beyond its query and answer: a key, links, slots in two dictionaries."""
# ASCII without control characters and without "[", with which the special tokens of BERT begin.
_FOLDABLE = re.compile(r"[ -Z\\-~\t\n\r]*")


def fold(query: str) -> str:
    """Return a plain-ASCII query in lower case with single spaces, any other unchanged.

    Only for a model whose tokenizer gives both the same tokens, and so the same answer
    (`search.serving.encoder_worker.tokenizer_folds` checks that). Beyond ASCII, case and width have too many
    exceptions.
    """
    return " ".join(query.lower().split()) if _FOLDABLE.fullmatch(query) else query


class ResultCache(Generic[Answer]):
    """The most recently used answers, in at most `max_bytes`; `size` returns the bytes of one."""

    def __init__(self, max_bytes: int, size: Callable[[Answer], int]) -> None:
        self._entries: LRUCache[tuple[str, int], tuple[Answer, int]] = LRUCache(
            max_bytes, lambda entry: entry[1]
        )
        self._size = size

    @property
    def bytes(self) -> int:
        """Bytes used by the entries."""
        return int(self._entries.currsize)

    def get(self, query: str, topk: int) -> Answer | None:
        """Return the answer, None without one."""
        entry = self._entries.get((query, topk))
        return None if entry is None else entry[0]

    def put(self, query: str, topk: int, answer: Answer) -> None:
        """Store an answer, evicting the least recently used ones."""
        size = sys.getsizeof(query) + self._size(answer) + _ENTRY_BYTES
        if size <= self._entries.maxsize:
            self._entries[query, topk] = answer, size
