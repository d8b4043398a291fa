"""Repeated queries: a cache of answers bounded in bytes, and single flight.

    cache = ResultCache(max_bytes=256 << 20, size=size_of)
    flights = SingleFlight(cache)

An answer depends on the collection's version, the model with its revision, the query (after `fold`, if the
model allows it) and topk. A server's collection and model never change, so a key holds the last two. The five
attempts at a question ask alike, often at the same moment: of identical queries in progress, one is executed
and all get its answer. A caller that leaves does not cancel it for the others; the last one does. Failures
are not cached.
"""

import asyncio
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


class Flight(Generic[Answer]):
    """A query in progress and the number of callers that wait for it."""

    def __init__(self, future: "asyncio.Future[Answer]", cancel: Callable[[], None]) -> None:
        self.future = future
        self._cancel = cancel
        self.waiters = 1

    def leave(self) -> None:
        """Stop waiting; the last caller to leave before the answer arrives cancels the query."""
        self.waiters -= 1
        if not self.waiters and not self.future.done():
            self._cancel()


class SingleFlight(Generic[Answer]):
    """The flights that can be joined, by query and topk; their answers are stored in `cache`."""

    def __init__(self, cache: ResultCache[Answer]) -> None:
        self._cache = cache
        self._flights: dict[tuple[str, int], Flight[Answer]] = {}

    def join(self, query: str, topk: int) -> Flight[Answer] | None:
        """Join the flight of an identical query; None without one."""
        flight = self._flights.get((query, topk))
        if flight is None or flight.future.cancelled():
            return None
        flight.waiters += 1
        return flight

    def add(self, query: str, topk: int, flight: Flight[Answer]) -> None:
        """Let others join a flight until its future is done."""

        def land(future: "asyncio.Future[Answer]") -> None:
            if self._flights.get((query, topk)) is flight:
                del self._flights[query, topk]
            if not future.cancelled() and future.exception() is None:
                self._cache.put(query, topk, future.result())

        self._flights[query, topk] = flight
        flight.future.add_done_callback(land)
