"""The service without HTTP: cache, single flight, batches, deadline, canary query.

    (hits,) = await Retrieval(store, encoders, Metrics()).search(["who founded Orrin"], topk=3)

Failures are not cached. Answers become JSON in the index thread, so a cached one costs a join of bytes.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from cachetools import LRUCache

from search.serving.batching import Batcher, BatchLimits, Query, Unavailable
from search.serving.encoders import CANARY, EncoderPool
from search.serving.metrics import Metrics
from search.stored_index import StoredIndex

Answer = TypeVar("Answer")

_ENTRY_BYTES = 600  # Memory of an entry besides its query and answer: a key, links, slots in two dictionaries
# ASCII without control characters and without "[", which begins BERT's special tokens.
_FOLDABLE = re.compile(r"[ -Z\\-~\t\n\r]*")


def fold(query: str) -> str:
    """Return a plain-ASCII query in lower case with single spaces, any other unchanged."""
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


class Hits(NamedTuple):
    """One query's passages, best first: each as JSON, and its cosine similarity."""

    documents: tuple[bytes, ...]
    scores: tuple[float, ...]

    def size(self) -> int:
        """Return the bytes in memory."""
        return sum(map(sys.getsizeof, (self, self.documents, self.scores, *self.documents, *self.scores)))

    def plain(self) -> bytes:
        """Return the list without scores, as JSON."""
        return b"[%b]" % b",".join(self.documents)

    def scored(self) -> bytes:
        """Return the list with scores, as JSON."""
        items = zip(self.documents, self.scores, strict=True)
        return b"[%b]" % b",".join(
            b'{"document":%b,"score":%b}' % (document, _to_json(score)) for document, score in items
        )


_to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ServiceLimits:
    """`deadline_s` bounds a request, `canary_s` a health check. `cache_bytes` 0 means no cache."""

    deadline_s: float = 30.0
    canary_s: float = 3.0
    cache_bytes: int = 256 << 20
    batch: BatchLimits = field(default_factory=BatchLimits)


class Retrieval:
    """Answers queries from one index, in one event loop. Raises Unavailable if a retry may help."""

    def __init__(
        self,
        store: StoredIndex,
        encoders: EncoderPool,
        metrics: Metrics,
        limits: ServiceLimits | None = None,
        folds: bool = False,
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.limits = limits or ServiceLimits()
        self.draining = False
        self.batcher: Batcher[Hits] = Batcher(encoders, self._find, metrics, self.limits.batch)
        self._fold = fold if folds else str
        self._cache: ResultCache[Hits] = ResultCache(self.limits.cache_bytes, Hits.size)
        self._flights: dict[tuple[str, int], Query[Hits]] = {}
        self._canary: asyncio.Task[None] | None = None
        metrics.cache_bytes.set_function(lambda: self._cache.bytes)

    async def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Return each query's hits, in order."""
        self.metrics.queries.inc(len(queries))
        if not self.limits.cache_bytes:
            self.batcher.check_room(len(queries))
            submitted = self.batcher.submit(queries, topk)
            await self._wait(submitted)
            return [query.future.result() for query in submitted]
        keys = [self._fold(query) for query in queries]
        found = {key: hits for key in keys if (hits := self._cache.get(key, topk)) is not None}
        misses = sum(key not in found for key in keys)
        self.metrics.cache_hits.inc(len(keys) - misses)
        if misses:
            missing = {key: query for key, query in zip(keys, queries, strict=True) if key not in found}
            joined = self._join(missing, topk)
            self.metrics.cache_misses.inc(misses)
            await self._wait(list(joined.values()))
            found.update((key, flight.future.result()) for key, flight in joined.items())
        return [found[key] for key in keys]

    async def check(self) -> None:
        """Answer a canary query, without cache and queue. Raises what queries raise. Callers share one."""

        async def ask() -> None:
            deadline_s = min(self.limits.canary_s, self.limits.deadline_s)
            (query,) = self.batcher.submit([CANARY], 1, urgent=True)
            try:
                async with asyncio.timeout(deadline_s):
                    await query.future
            except TimeoutError:
                raise Unavailable(f"no answer within {deadline_s:g} s to a canary query") from None
            finally:
                self.batcher.leave(query)

        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(ask())
        await asyncio.shield(self._canary)

    def drain(self, limit_s: float) -> None:
        """Refuse new requests, and fail open ones after `limit_s` seconds: the server exits."""
        if not self.draining:
            self.draining = True
            asyncio.get_running_loop().call_later(
                limit_s, self.batcher.give_up, "the server is shutting down"
            )

    def _join(self, missing: dict[str, str], topk: int) -> dict[str, Query[Hits]]:
        """Join identical queries in progress, submit the others. `missing` maps keys to queries."""
        flights: dict[str, Query[Hits]] = {}
        for key in missing:
            query = self._flights.get((key, topk))
            if query is not None and not query.future.cancelled():
                query.waiters += 1
                flights[key] = query
        self.metrics.joins.inc(len(flights))
        new = {key: text for key, text in missing.items() if key not in flights}
        try:
            if new:
                self.batcher.check_room(len(new))
        except Unavailable:
            for query in flights.values():
                self.batcher.leave(query)
            raise
        for key, query in zip(new, self.batcher.submit(list(new.values()), topk), strict=True):
            flights[key] = self._flights[key, topk] = query
            query.future.add_done_callback(partial(self._land, key, query))
        return flights

    def _land(self, key: str, query: Query[Hits], future: "asyncio.Future[Hits]") -> None:
        if self._flights.get((key, query.topk)) is query:
            del self._flights[key, query.topk]
        if not future.cancelled() and future.exception() is None:
            self._cache.put(key, query.topk, future.result())

    async def _wait(self, queries: Sequence[Query[Hits]]) -> None:
        """Wait for all queries until the deadline, then leave them. Raises the first failure."""
        try:
            done, pending = await asyncio.wait(
                {query.future for query in queries},
                timeout=self.limits.deadline_s,
                return_when=asyncio.FIRST_EXCEPTION,
            )
        finally:
            for query in queries:
                self.batcher.leave(query)
        for future in done:
            future.result()
        if pending:
            raise Unavailable(
                f"no answer within {self.limits.deadline_s:g} s: the server is overloaded or its index hangs",
                self.batcher.retry_after_s(),
            )

    def _find(self, vectors: np.ndarray, topk: int) -> list[Hits]:
        return [
            Hits(tuple(_to_json(hit["document"]) for hit in hits), tuple(hit["score"] for hit in hits))
            for hits in self.store.query(vectors, topk)
        ]
