"""Turn concurrent requests into batches for one worker thread.

An embedder and an index answer 64 queries in little more time than one, and neither gains from two threads at
once. While the worker is busy, requests gather in a queue; when it is free it takes what is there, up to
`max_batch` queries. No request waits for others to come, so a lone one is answered at once.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Request(Generic[Answer]):
    queries: Sequence[str]
    topk: int
    future: "Future[list[list[Answer]]]" = field(default_factory=Future)


class Batcher(Generic[Answer]):
    """Runs `answer(queries, topk)` → topk answers a query, best first, in one thread, for all callers."""

    def __init__(self, answer: Callable[[list[str], int], list[list[Answer]]], max_batch: int = 256) -> None:
        self._answer = answer
        self._max_batch = max_batch
        self._queue: SimpleQueue[_Request[Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, queries: Sequence[str], topk: int) -> "Future[list[list[Answer]]]":
        """Queue a request; its future gives one list a query, in order, or the exception that ended its
        batch.

        Cancelling the future of a request that still waits takes it out of the queue.
        """
        request: _Request[Answer] = _Request(queries, topk)
        self._queue.put(request)
        return request.future

    def close(self) -> None:
        """Answer what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            batch, last = self._gather(request)
            if batch:
                self._work(batch)
            if last:
                return

    def _gather(self, request: _Request[Answer]) -> tuple[list[_Request[Answer]], bool]:
        """Return the requests of the next batch, cancelled ones left out, and whether the end was seen."""
        batch: list[_Request[Answer]] = []
        size = 0
        upcoming: _Request[Answer] | None = request
        while upcoming is not None:
            if upcoming.future.set_running_or_notify_cancel():
                batch.append(upcoming)
                size += len(upcoming.queries)
            if size >= self._max_batch:
                return batch, False
            try:
                upcoming = self._queue.get_nowait()
            except Empty:
                return batch, False
        return batch, True

    def _work(self, batch: list[_Request[Answer]]) -> None:
        queries = [query for request in batch for query in request.queries]
        try:
            answers = iter(self._answer(queries, max(request.topk for request in batch)))
            results = [[next(answers)[: request.topk] for _ in request.queries] for request in batch]
        except (
            BaseException
        ) as error:  # whatever it was, it is the callers' to see, and the thread must live on
            for request in batch:
                request.future.set_exception(error)
            return
        for request, result in zip(batch, results, strict=True):
            request.future.set_result(result)
