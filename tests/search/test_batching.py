"""The scheduler alone: when a batch starts, what it contains, and what happens on failures."""

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import numpy as np
import pytest
import search_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from search.errors import StoreUnavailable
from search.serving.batching import Batcher, BatchLimits, Unavailable
from search.serving.encoders import EncodeFailed, EncoderDied
from search.serving.metrics import Metrics

LONG_S = 2.0  # a window that no test reaches by accident


class Encoders:
    """Encodes a text as its number once `gate` is open. "bad" fails, "nan" has no vector, "lethal" kills."""

    def __init__(self, ready: int = 1) -> None:
        self.ready = ready
        self.on_ready: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[list[str]] = []
        self.deaths = 0

    async def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(texts))
        await self.gate.wait()
        if "lethal" in texts and self.deaths:
            self.deaths -= 1
            raise EncoderDied
        if "bad" in texts:
            raise EncodeFailed("RuntimeError: bad text")
        return np.array([[math.nan if text == "nan" else _number(text)] for text in texts])


class Index:
    """Answers a vector with `topk` copies of its number, or raises `down`."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.down: Exception | None = None

    def __call__(self, vectors: np.ndarray, topk: int) -> list[list[float]]:
        self.calls.append((len(vectors), topk))
        if self.down is not None:
            raise self.down
        return [[float(vector[0])] * topk for vector in vectors]


def _number(text: str) -> float:
    return float(sum(map(ord, text)))


BENCHES: "list[Bench]" = []


class Bench:
    """A scheduler with its stand-ins."""

    def __init__(self, ready: int = 1, **limits: float) -> None:
        BENCHES.append(self)
        self.encoders, self.index = Encoders(ready), Index()
        self.batcher: Batcher[list[float]] = Batcher(
            self.encoders,
            self.index,
            Metrics(),
            BatchLimits(**{"window_s": LONG_S, **limits}),  # type: ignore[arg-type]
        )

    async def ask(self, *texts: str, topk: int = 1) -> list[list[float]]:
        """One request, all its answers."""
        return await asyncio.gather(*(query.future for query in self.batcher.submit(texts, topk)))

    async def occupy(self) -> "asyncio.Task[list[list[float]]]":
        """Let every encoder be busy with a batch of one until the gate opens."""
        self.encoders.gate.clear()
        tasks = []
        for number in range(self.encoders.ready):
            tasks.append(asyncio.create_task(self.ask(f"busy{number}")))
            await turns()
        self.encoders.batches.clear()
        return tasks[0]


async def turns() -> None:
    """Let everything that is ready happen."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop, and close its schedulers."""

    async def whole(**given: Any) -> None:
        await test(**given)
        while BENCHES:
            bench = BENCHES.pop()
            bench.encoders.gate.set()
            await bench.batcher.close()

    return search_parts.in_a_loop(wraps(test)(whole))


# --- the window ---


@in_a_loop
async def test_a_lone_client_does_not_wait():
    bench = Bench()
    for texts in (["a"], ["b", "c"], ["d"]):
        bench.batcher.submit(texts, 1)
        await turns()
        assert bench.encoders.batches[-1] == texts
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("others", [["b"], []], ids=["comes", "is refused"])
@in_a_loop
async def test_a_batch_waits_until_a_request_that_has_begun_to_arrive_comes_or_is_refused(others):
    bench = Bench()
    bench.batcher.expect()
    bench.batcher.submit(["a"], 1)
    await turns()
    assert not bench.encoders.batches
    bench.batcher.arrived()
    for text in others:
        bench.batcher.submit([text], 1)
    await turns()
    assert bench.encoders.batches == [["a", *others]]


@in_a_loop
async def test_a_batch_waits_no_longer_than_the_window():
    bench = Bench(window_s=0.02)
    bench.batcher.expect()
    assert await bench.ask("a") == [[_number("a")]]


@in_a_loop
async def test_a_batch_waits_only_for_the_clients_that_were_answered_together():
    bench = Bench()
    await asyncio.gather(*(bench.ask(text) for text in "abc"))
    for text in "def":
        bench.batcher.expect()
        assert bench.encoders.batches == [["a", "b", "c"]]
        bench.batcher.arrived()
        bench.batcher.submit([text], 1)
        await turns()
    assert bench.encoders.batches[1:] == [["d", "e", "f"]]


@in_a_loop
async def test_a_full_batch_does_not_wait():
    bench = Bench(batch=2)
    bench.batcher.expect()
    bench.batcher.submit(["a", "b"], 1)
    await turns()
    assert bench.encoders.batches == [["a", "b"]]


# --- batches ---


@in_a_loop
async def test_queued_queries_are_one_batch_up_to_its_limit_oldest_first():
    bench = Bench(batch=4)
    await bench.occupy()
    asked = [asyncio.create_task(bench.ask(*texts)) for texts in ("a", "bb", "c", "d")]
    await turns()
    bench.encoders.gate.set()
    answers = await asyncio.gather(*asked)
    assert bench.encoders.batches == [["a", "b", "b", "c"], ["d"]]
    assert answers == [[[_number(text)] for text in texts] for texts in ("a", "bb", "c", "d")]


@in_a_loop
async def test_two_free_encoders_share_the_queue():
    bench = Bench(ready=2)
    await bench.occupy()
    asked = asyncio.create_task(bench.ask(*map(str, range(40))))
    await turns()
    bench.encoders.gate.set()
    await asked
    assert sorted(map(len, bench.encoders.batches)) == [20, 20]


@in_a_loop
async def test_the_next_batch_is_encoded_while_one_is_searched():
    bench = Bench(batch=1)
    searching, go_on = threading.Event(), threading.Event()

    def slow(vectors: np.ndarray, topk: int) -> list[list[float]]:
        searching.set()
        assert go_on.wait(20)
        return [[0.0]] * len(vectors)

    bench.batcher._search = slow
    first, second = (asyncio.create_task(bench.ask(text)) for text in "ab")
    await asyncio.to_thread(searching.wait, 20)
    await turns()
    assert bench.encoders.batches == [["a"], ["b"]]
    first.cancel()  # its answer comes too late
    go_on.set()
    await second


@in_a_loop
async def test_each_topk_is_searched_separately():
    bench = Bench()
    few, many, more = await asyncio.gather(bench.ask("a"), bench.ask("b", topk=5), bench.ask("c"))
    assert [len(answer) for (answer,) in (few, many, more)] == [1, 5, 1]
    assert sorted(bench.index.calls) == [(1, 5), (2, 1)]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.text(max_size=5), min_size=1, max_size=5), st.integers(1, 3)), max_size=20
    ),
    st.integers(1, 8),
    st.integers(1, 3),
)
@in_a_loop
async def test_every_request_gets_its_own_answers_in_order(requests, batch, ready):
    requests = [([f"x{text}" for text in texts], topk) for texts, topk in requests]
    bench = Bench(ready, batch=batch, window_s=0.001)
    answers = await asyncio.gather(*(bench.ask(*texts, topk=topk) for texts, topk in requests))
    assert answers == [[[_number(text)] * topk for text in texts] for texts, topk in requests]


# --- a full queue, and clients that leave ---


@in_a_loop
async def test_a_full_queue_refuses_at_once():
    bench = Bench(queue=3)
    await bench.occupy()
    bench.batcher.check_room(100)  # nothing waits: one request may be larger than the queue
    bench.batcher.submit(["a", "b"], 1)
    bench.batcher.check_room(1)
    with pytest.raises(Unavailable, match="2 queries wait, at most 3 may"):
        bench.batcher.check_room(2)


@in_a_loop
async def test_a_cancelled_query_is_not_encoded_and_frees_its_place():
    bench = Bench(queue=2)
    await bench.occupy()
    given_up, kept = bench.batcher.submit(["given up", "kept"], 1)
    bench.batcher.leave(given_up)
    bench.batcher.check_room(1)
    bench.encoders.gate.set()
    await kept.future
    assert bench.encoders.batches == [["kept"]]


@in_a_loop
async def test_cancelled_queries_are_forgotten_although_no_encoder_is_ready():
    bench = Bench(ready=0)
    futures = []
    for _ in range(100):
        (query,) = bench.batcher.submit(["given up"], 1)
        bench.batcher.leave(query)
        futures.append(weakref.ref(query.future))
    del query
    gc.collect()
    assert not any(future() for future in futures)


@in_a_loop
async def test_a_query_cancelled_while_it_is_encoded_is_not_searched():
    bench = Bench()
    bench.encoders.gate.clear()
    given_up, kept = bench.batcher.submit(["given up", "kept"], 1)
    await turns()
    bench.batcher.leave(given_up)
    bench.encoders.gate.set()
    await kept.future
    assert bench.index.calls == [(1, 1)]


# --- failures ---


@pytest.mark.parametrize(("bad", "reason"), [("bad", "RuntimeError: bad text"), ("nan", "no finite vector")])
@in_a_loop
async def test_a_bad_query_fails_alone(bad, reason):
    bench = Bench()
    good, failed, other = await asyncio.gather(
        bench.ask("a", "b"), bench.ask(bad), bench.ask("c"), return_exceptions=True
    )
    assert (good, other) == ([[_number("a")], [_number("b")]], [[_number("c")]])
    assert isinstance(failed, EncodeFailed) and reason in str(failed)


@in_a_loop
async def test_an_unavailable_index_is_called_once_per_batch_and_works_when_it_is_back():
    bench = Bench()
    bench.index.down = StoreUnavailable("folder gone")
    failures = await asyncio.gather(*(bench.ask(text) for text in "abc"), return_exceptions=True)
    assert [str(failure) for failure in failures] == ["the index does not answer: folder gone"] * 3
    assert all(isinstance(failure, Unavailable) for failure in failures)
    assert bench.index.calls == [(3, 1)]
    bench.index.down = None
    assert await bench.ask("a") == [[_number("a")]]


@in_a_loop
async def test_a_batch_whose_encoder_died_is_repeated_on_another_ahead_of_the_others():
    bench = Bench(batch=2)
    bench.encoders.deaths = 1
    answers = await asyncio.gather(*(bench.ask(text) for text in ("a", "lethal", "c")))
    assert answers == [[[_number(text)]] for text in ("a", "lethal", "c")]
    assert bench.encoders.batches == [["a", "lethal"], ["a", "lethal"], ["c"]]


@in_a_loop
async def test_a_batch_whose_encoder_died_twice_is_unavailable():
    bench = Bench()
    bench.encoders.deaths = 2
    with pytest.raises(Unavailable, match="died twice"):
        await bench.ask("lethal")
    assert await bench.ask("a") == [[_number("a")]]


@in_a_loop
async def test_closing_fails_all_queries_and_does_not_wait_for_an_encoder_that_hangs(monkeypatch):
    monkeypatch.setattr("search.serving.batching.CLOSE_S", 0.01)
    bench = Bench()
    hanging = await bench.occupy()
    waiting = asyncio.create_task(bench.ask("a"))
    await turns()
    await bench.batcher.close()  # the gate stays shut
    for task in (hanging, waiting):
        with pytest.raises(Unavailable, match="closed"):
            await task
    assert not bench.encoders.batches


@in_a_loop
async def test_queries_wait_while_no_encoder_is_ready():
    bench = Bench(ready=0)
    asked = asyncio.create_task(bench.ask("a"))
    await turns()
    assert not bench.encoders.batches
    bench.encoders.ready = 1
    bench.encoders.on_ready()
    assert await asked == [[_number("a")]]
