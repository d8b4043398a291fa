"""What the server does with a request, HTTP aside: cache, single flight, batches, deadline, canary.

Answers are kept as JSON from the index thread on, so that an answer from the cache costs a join of bytes, and
the cache's size is what it takes.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from search.batching import Batcher, BatchLimits, Encoders, QueueFull, Unavailable
from search.cache import Flight, ResultCache, SingleFlight, fold
from search.encoder_worker import CANARY
from search.metrics import Metrics
from search.store import Store


class Hits(NamedTuple):
    """The passages of one query, best first: each as JSON, and its cosine similarity."""

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


@dataclass(frozen=True)
class ServiceLimits:
    """`deadline_s` bounds a request, `canary_s` a health check; `cache_bytes` 0 means no cache."""

    deadline_s: float = 30.0
    canary_s: float = 3.0
    cache_bytes: int = 256 << 20
    batch: BatchLimits = field(default_factory=BatchLimits)


class Retrieval:
    """Answers queries from one collection. `folds`: the model allows `search.cache.fold`.

    To be made and used in one event loop. Raises Unavailable for what is worth asking again, any other
    exception for a query that failed by itself.
    """

    def __init__(
        self,
        store: Store,
        encoders: Encoders,
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
        self._cache: ResultCache[Hits] = ResultCache(self.limits.cache_bytes, _size)
        self._flights = SingleFlight(self._cache)
        self._canary: asyncio.Task[None] | None = None
        metrics.cache_bytes.set_function(lambda: self._cache.bytes)

    async def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Return the hits of each query, in order."""
        self.metrics.queries.inc(len(queries))
        if self.limits.cache_bytes:
            return await self._search_cached(queries, topk)
        self.check_room(len(queries))
        flights = self._submit(queries, topk)
        await self._wait(flights)
        return [flight.future.result() for flight in flights]

    def check_room(self, count: int) -> None:
        """Raise QueueFull, and count it, unless so many queries fit into the queue."""
        try:
            self.batcher.check_room(count)
        except QueueFull:
            self.metrics.rejected.inc()
            raise

    async def check(self) -> None:
        """Answer a canary query, past cache and queue; raises what queries get. Callers share one."""
        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(self._ask_canary())
        await asyncio.shield(self._canary)

    def give_up(self) -> None:
        """Answer all that is still open with Unavailable: the server ends."""
        self.batcher.give_up("the server is shutting down")

    async def _search_cached(self, queries: Sequence[str], topk: int) -> list[Hits]:
        keys = [self._fold(query) for query in queries]
        found = {key: hits for key in keys if (hits := self._cache.get(key, topk)) is not None}
        misses = sum(key not in found for key in keys)
        self.metrics.cache_hits.inc(len(keys) - misses)
        if misses:
            missing = {key: query for key, query in zip(keys, queries, strict=True) if key not in found}
            flights = self._board(missing, topk)
            self.metrics.cache_misses.inc(misses)
            await self._wait(list(flights.values()))
            found.update((key, flight.future.result()) for key, flight in flights.items())
        return [found[key] for key in keys]

    def _board(self, missing: dict[str, str], topk: int) -> dict[str, Flight[Hits]]:
        """Join the flights of identical queries, start those of the others; `missing` is query by key."""
        flights = {key: flight for key in missing if (flight := self._flights.join(key, topk)) is not None}
        new = {key: query for key, query in missing.items() if key not in flights}
        self.metrics.joins.inc(len(flights))
        if new:
            try:
                self.check_room(len(new))
            except QueueFull:
                for flight in flights.values():
                    flight.leave()
                raise
            for key, flight in zip(new, self._submit(list(new.values()), topk), strict=True):
                self._flights.add(key, topk, flight)
                flights[key] = flight
        return flights

    def _submit(self, queries: Sequence[str], topk: int) -> list[Flight[Hits]]:
        batcher = self.batcher
        return [
            Flight(query.future, lambda query=query: batcher.cancel(query))  # type: ignore[misc]
            for query in batcher.submit(queries, topk)
        ]

    async def _wait(self, flights: Sequence[Flight[Hits]]) -> None:
        """Wait for all flights within the deadline, then leave them; raises the first failure."""
        try:
            done, pending = await asyncio.wait(
                {flight.future for flight in flights},
                timeout=self.limits.deadline_s,
                return_when=asyncio.FIRST_EXCEPTION,
            )
        finally:
            for flight in flights:
                flight.leave()
        for future in done:
            future.result()
        if pending:
            raise Unavailable(
                f"no answer within {self.limits.deadline_s:g} s: the server is overloaded or its index hangs",
                self.batcher.retry_after_s(),
            )

    async def _ask_canary(self) -> None:
        deadline_s = min(self.limits.canary_s, self.limits.deadline_s)
        (query,) = self.batcher.submit([CANARY], 1, urgent=True)
        try:
            async with asyncio.timeout(deadline_s):
                await query.future
        except TimeoutError:
            raise Unavailable(f"no answer within {deadline_s:g} s to a canary query") from None
        finally:
            self.batcher.cancel(query)

    def _find(self, vectors: np.ndarray, topk: int) -> list[Hits]:
        """Runs in a thread."""
        return [
            Hits(tuple(_to_json(hit["document"]) for hit in hits), tuple(hit["score"] for hit in hits))
            for hits in self.store.query(vectors, topk)
        ]


def _size(hits: Hits) -> int:
    return sum(map(sys.getsizeof, (hits, hits.documents, hits.scores, *hits.documents, *hits.scores)))
