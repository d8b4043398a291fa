"""The scheduler: concurrent queries become batches, which are encoded and then searched.

A free encoder starts at once unless more queries are known to come. Then it waits until all are there, a
batch is full, or the oldest query has waited `window_s`. A failed batch is repeated query by query, or as
a whole once if its encoder died. All state belongs to the event loop.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np

from search.errors import StoreUnavailable
from search.serving.encoders import EncodeFailed, EncoderDied, EncoderPool
from search.serving.metrics import Metrics

Answer = TypeVar("Answer")

INDEX_THREADS = 2  # batches searched at once: Chroma searches a batch in one thread
SMALLEST_SHARE = 8  # Two free encoders share the queue, but not in smaller parts, where fixed costs dominate
CLOSE_S = 1.0


class Unavailable(Exception):
    """No answer now, for a reason other than the query. A retry may help."""


class IndexUnavailable(Unavailable):
    """The server works, but its index does not answer."""


@dataclass(slots=True, eq=False)
class Query(Generic[Answer]):
    """A query, its waiting callers, and the `future` of its answer. `retried`: its encoder died."""

    text: str
    topk: int
    request: int
    future: "asyncio.Future[Answer]"
    queued_at: float
    waiters: int = 1
    retried: bool = False
    vector: np.ndarray | None = None


@dataclass(frozen=True)
class BatchLimits:
    """At most `batch` queries in a batch and `queue` waiting. The module's docstring explains `window_s`."""

    batch: int = 64
    queue: int = 4096
    window_s: float = 0.003


class Batcher(Generic[Answer]):
    """Answers queries in batches: `encoders` give vectors, `search(vectors, topk)` the answers."""

    def __init__(
        self,
        encoders: EncoderPool,
        search: Callable[[np.ndarray, int], Sequence[Answer]],
        metrics: Metrics,
        limits: BatchLimits,
    ) -> None:
        self._encoders = encoders
        self._search = search
        self._metrics = metrics
        self._limits = limits
        # An ordered set, so that a cancelled query can leave at once.
        self._queue: OrderedDict[Query[Answer], None] = OrderedDict()
        self._encoding = 0
        self._underway: dict[asyncio.Task[None], list[Query[Answer]]] = {}
        self._arriving = 0
        self._due, self._due_until = 0, 0.0
        self._requests = 0
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="index")
        self._loop = asyncio.get_running_loop()
        encoders.on_ready = self._wake
        metrics.queue_depth.set_function(lambda: len(self._queue))

    def expect(self) -> None:
        """Count a request that has begun to arrive. Always call `arrived` afterwards."""
        self._arriving += 1

    def arrived(self) -> None:
        """Record that an expected request is about to be submitted, or was refused or lost."""
        self._arriving -= 1
        self._due = max(0, self._due - 1)
        if self._queue:  # a batch may have been held for this one
            self._wake()

    def check_room(self, count: int) -> None:
        """Raise Unavailable, and count it, unless `count` queries fit. An empty queue takes any number."""
        waiting = len(self._queue)
        if waiting and waiting + count > self._limits.queue:
            self._metrics.rejected.inc()
            raise Unavailable(f"overloaded: {waiting} queries wait, at most {self._limits.queue} may")

    def submit(self, texts: Sequence[str], topk: int, urgent: bool = False) -> list[Query[Answer]]:
        """Queue one request's queries, at the head if `urgent`, after `check_room`."""
        self._requests += 1
        now = time.monotonic()
        queries = [Query(text, topk, self._requests, self._loop.create_future(), now) for text in texts]
        if urgent:
            self._put_first(queries)
        else:
            self._queue.update(dict.fromkeys(queries))
        self._wake()
        return queries

    def leave(self, query: Query[Answer]) -> None:
        """Stop waiting for a query. The last caller to leave cancels it."""
        query.waiters -= 1
        if not query.waiters:
            self._queue.pop(query, None)
            query.future.cancel()

    def give_up(self, reason: str) -> None:
        """Fail all queries that are queued or in progress."""
        for query in (*self._queue, *(query for batch in self._underway.values() for query in batch)):
            _fail(query, Unavailable(reason))
        self._queue.clear()

    async def close(self) -> None:
        """Fail all queries and wait up to `CLOSE_S` seconds for the batches in progress."""
        self.give_up("the scheduler is closed")
        if self._underway:
            await asyncio.wait(self._underway, timeout=CLOSE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- when a batch starts ---

    def _wake(self) -> None:
        """Dispatch at the loop's next turn, so that this turn's other requests join the batch."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        while self._queue:
            ready, waiting = self._encoders.ready, len(self._queue)
            free = ready - self._encoding
            if free <= 0 or len(self._underway) >= ready + INDEX_THREADS:
                return
            if (hold := self._hold_s()) > 0:
                self._later = self._loop.call_later(hold, self._wake)
                return
            size = min(self._limits.batch, max(math.ceil(waiting / free), SMALLEST_SHARE), waiting)
            batch = [self._queue.popitem(last=False)[0] for _ in range(size)]
            self._encoding += 1
            task = self._loop.create_task(self._work(batch))
            self._underway[task] = batch

    def _hold_s(self) -> float:
        now = time.monotonic()
        due_s = self._due_until - now if self._due else 0.0
        if len(self._queue) >= self._limits.batch or not (self._arriving or due_s > 0):
            return 0.0
        left = next(iter(self._queue)).queued_at + self._limits.window_s - now
        return left if self._arriving else min(left, due_s)

    def _put_first(self, queries: Sequence[Query[Answer]]) -> None:
        for query in reversed(queries):
            self._queue[query] = None
            self._queue.move_to_end(query, last=False)

    # --- the steps of a batch ---

    async def _work(self, batch: list[Query[Answer]]) -> None:
        self._metrics.batch.observe(len(batch))
        try:
            try:
                await self._each(batch, self._encode)
            finally:
                self._encoding -= 1
                self._wake()
            for topk in {query.topk for query in batch}:
                # One topk at a time: from an approximate index, a cut larger one would give other answers.
                await self._each([query for query in batch if query.topk == topk], self._find)
        except EncoderDied:
            for query in batch:
                if query.retried:
                    _fail(query, Unavailable("the encoder died twice over this query"))
                query.retried = True
            self._put_first([query for query in batch if not query.future.done()])
        except Exception as error:  # of a failure of any kind, callers must not wait for the deadline
            is_index = isinstance(error, StoreUnavailable)
            reason = IndexUnavailable(f"the index does not answer: {error}") if is_index else error
            for query in batch:
                _fail(query, reason)
        finally:
            now = time.monotonic()
            self._underway.pop(cast(asyncio.Task[None], asyncio.current_task()))
            requests = len({query.request for query in batch if query not in self._queue})
            if requests > 1:
                self._due = requests + (self._due if now < self._due_until else 0)
                self._due_until = now + self._limits.window_s
            self._wake()

    async def _each(
        self, batch: list[Query[Answer]], step: Callable[[list[Query[Answer]]], Awaitable[None]]
    ) -> None:
        batch = [query for query in batch if not query.future.done()]
        if not batch:
            return
        try:
            await step(batch)
        except (EncoderDied, StoreUnavailable):
            raise
        except Exception as error:  # the model's or the index's: raised to the query that caused it
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for query in batch:
                await self._each([query], step)

    async def _encode(self, batch: list[Query[Answer]]) -> None:
        started = time.monotonic()
        vectors = await self._encoders.encode([query.text for query in batch])
        # A context manager would count failed batches too.
        self._metrics.encode.observe(time.monotonic() - started)
        for query, vector, finite in zip(batch, vectors, np.isfinite(vectors).all(axis=1), strict=True):
            query.vector = vector
            if not finite:  # the index would fail the whole batch for it
                _fail(query, EncodeFailed("the model gives no finite vector for this query"))

    async def _find(self, batch: list[Query[Answer]]) -> None:
        vectors = np.stack([query.vector for query in batch if query.vector is not None])
        started = time.monotonic()
        answers = await self._loop.run_in_executor(self._threads, self._search, vectors, batch[0].topk)
        self._metrics.index.observe(time.monotonic() - started)
        for query, answer in zip(batch, answers, strict=True):
            if not query.future.done():
                query.future.set_result(answer)


def _fail(query: Query[Answer], error: BaseException) -> None:
    if not query.future.done():
        query.future.set_exception(error)
        query.future.exception()  # retrieved, so that asyncio does not log it if there is no caller
