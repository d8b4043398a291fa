"""The service without HTTP: cache, single flight, batches, deadline, canary. Failures are not cached."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from cachetools import LRUCache

from search.serving.batching import Batcher, BatchLimits, Query, Unavailable
from search.serving.encoders import CANARY, EncoderPool
from search.serving.metrics import Metrics
from search.stored_index import StoredIndex

_ENTRY_BYTES = 600  # Memory of an entry besides its query and answer: a key, links, slots in two dictionaries


class Hits(NamedTuple):
    """One query's passages, best first: each as JSON, and its cosine similarity."""

    documents: tuple[bytes, ...]
    scores: tuple[float, ...]

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


def _memory(entry: tuple[str, Hits]) -> int:
    query, hits = entry
    parts = (query, hits, hits.documents, hits.scores, *hits.documents, *hits.scores)
    return _ENTRY_BYTES + sum(map(sys.getsizeof, parts))


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
        self, store: StoredIndex, encoders: EncoderPool, metrics: Metrics, limits: ServiceLimits | None = None
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.limits = limits = limits or ServiceLimits()
        self.draining = False
        self.batcher: Batcher[Hits] = Batcher(encoders, self._find, metrics, self.limits.batch)
        self._cache: LRUCache[tuple[str, int], tuple[str, Hits]] = LRUCache(limits.cache_bytes, _memory)
        self._flights: dict[tuple[str, int], Query[Hits]] = {}
        self._canary: asyncio.Task[None] | None = None
        metrics.cache_bytes.set_function(lambda: self._cache.currsize)

    async def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Return each query's hits, in order."""
        self.metrics.queries.inc(len(queries))
        found = dict(entry for text in queries if (entry := self._cache.get((text, topk))))
        misses = sum(text not in found for text in queries)
        self.metrics.cache_hits.inc(len(queries) - misses)
        if misses:
            joined = self._join(list(dict.fromkeys(text for text in queries if text not in found)), topk)
            self.metrics.cache_misses.inc(misses)
            await self._wait(list(joined.values()))
            found.update((text, flight.future.result()) for text, flight in joined.items())
        return [found[text] for text in queries]

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

    def _join(self, missing: Sequence[str], topk: int) -> dict[str, Query[Hits]]:
        """Join identical queries in progress, submit the others."""
        flights: dict[str, Query[Hits]] = {}
        for text in missing:
            query = self._flights.get((text, topk))
            if query is not None and not query.future.cancelled():
                query.waiters += 1
                flights[text] = query
        self.metrics.joins.inc(len(flights))
        new = [text for text in missing if text not in flights]
        try:
            if new:
                self.batcher.check_room(len(new))
        except Unavailable:
            for query in flights.values():
                self.batcher.leave(query)
            raise
        for query in self.batcher.submit(new, topk):
            flights[query.text] = self._flights[query.text, topk] = query
            query.future.add_done_callback(partial(self._land, query))
        return flights

    def _land(self, query: Query[Hits], future: "asyncio.Future[Hits]") -> None:
        key = query.text, query.topk
        if self._flights.get(key) is query:
            del self._flights[key]
        if not future.cancelled() and future.exception() is None:
            with suppress(ValueError):  # larger than the whole cache
                self._cache[key] = query.text, future.result()

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
                f"no answer within {self.limits.deadline_s:g} s: the server is overloaded or its index hangs"
            )

    def _find(self, vectors: np.ndarray, topk: int) -> list[Hits]:
        # JSON is made here, in the index thread, so that a cached answer costs a join of bytes.
        return [
            Hits(tuple(_to_json(hit["document"]) for hit in hits), tuple(hit["score"] for hit in hits))
            for hits in self.store.query(vectors, topk)
        ]
