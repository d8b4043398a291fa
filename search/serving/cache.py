"""A cache of answers to repeated queries, bounded in bytes.

    cache = ResultCache(max_bytes=256 << 20, size=size_of)

An answer depends on the collection, the model, the query and topk. A server's collection and model never
change, so the key is the query (after `fold`, if the model allows it) and topk.
"""

import re
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

Answer = TypeVar("Answer")

_ENTRY_BYTES = 600
"""Memory of an entry besides its query and answer: a key, links, slots in two dictionaries."""
# ASCII without control characters and without "[", which begins BERT's special tokens.
_FOLDABLE = re.compile(r"[ -Z\\-~\t\n\r]*")


def fold(query: str) -> str:
    """Return a plain-ASCII query in lower case with single spaces, any other unchanged.

    Use it only if the model's tokenizer gives both the same tokens
    (`search.serving.encoder_worker.tokenizer_folds`). Beyond ASCII, case and width have too many exceptions.
    """
    return " ".join(query.lower().split()) if _FOLDABLE.fullmatch(query) else query


class ResultCache(Generic[Answer]):
    """The most recently used answers, in at most `max_bytes`. `size` returns one answer's bytes."""

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
