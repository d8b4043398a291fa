"""Answers from the cache equal the answers without it, in bounded memory, executed once for all callers."""

import asyncio
import gc
import tracemalloc
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search_parts import COLLECTION, PASSAGES, SPEC, NearEncoders, build_collection, in_a_loop

from search.chroma.store import Store, open_collection
from search.embedders import Embedder
from search.errors import StoreUnavailable
from search.serving.batching import BatchLimits, Unavailable
from search.serving.metrics import Metrics
from search.serving.service import Hits, Retrieval, ServiceLimits

SLOW_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# The same text in another batch is padded differently, and its vector differs in the last digits of float32.
SAME_SCORE = 1e-5


@pytest.fixture(scope="module")
def embedder():
    embedder = Embedder(SPEC)
    embedder.load()
    return embedder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    chroma = build_collection(tmp_path_factory.mktemp("cache"))
    with open_collection(chroma, COLLECTION) as store:
        yield store


def serve(store: Store, embedder: Embedder, **limits: Any) -> Retrieval:
    """A service in the running event loop."""
    return Retrieval(store, NearEncoders(embedder), Metrics(), ServiceLimits(**limits))


def counted(retrieval: Retrieval, name: str) -> float:
    return retrieval.metrics.registry.get_sample_value(f"retrieval_{name}_total") or 0.0


def scores(hits: Hits) -> dict[bytes, float]:
    return dict(zip(hits.documents, hits.scores, strict=True))


# --- the same answers ---


@settings(max_examples=15, suppress_health_check=SLOW_FIXTURE)
@given(
    st.lists(
        st.lists(st.text(max_size=30) | st.sampled_from(["salt", "river"]), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 8),
)
@in_a_loop
async def test_any_batching_and_the_cache_give_the_answers_of_one_query_at_a_time(
    embedder, store, requests, batch
):
    """Same documents, same scores to 1e-5, in falling order: so the same ranks but for exact ties."""
    topk = len(PASSAGES)
    plain = serve(store, embedder, cache_bytes=0, batch=BatchLimits(batch=1))
    expected = [[(await plain.search([query], topk))[0] for query in queries] for queries in requests]
    for cache_bytes in (0, 1 << 20):
        service = serve(store, embedder, cache_bytes=cache_bytes, batch=BatchLimits(batch=batch))
        for _ in range(2):  # the second time from the cache
            found = await asyncio.gather(*(service.search(queries, topk) for queries in requests))
            for ours, alone in zip(chain(*found), chain(*expected), strict=True):
                assert scores(ours) == pytest.approx(scores(alone), abs=SAME_SCORE)
                assert list(ours.scores) == sorted(ours.scores, reverse=True)
        await service.batcher.close()
    await plain.batcher.close()


# --- single flight ---


@in_a_loop
async def test_equal_queries_are_executed_once(embedder, store):
    service = serve(store, embedder)
    await asyncio.gather(*(service.search([query], 3) for query in ("salt", "salt", "vell", "salt", "salt")))
    await service.search(["salt", "vell"], 3)
    assert service.batcher._encoders.batches == [["salt", "vell"]]  # type: ignore[attr-defined]
    names = ("cache_hits", "cache_misses", "single_flight_joins")
    assert [counted(service, name) for name in names] == [2, 5, 3]


@in_a_loop
async def test_another_topk_is_another_answer(embedder, store):
    service = serve(store, embedder)
    found = [len((await service.search(["salt"], topk))[0].documents) for topk in (2, 5, 2)]
    assert found == [2, 5, 2]


@pytest.mark.parametrize("leaver", [0, 1])
@in_a_loop
async def test_a_caller_that_leaves_does_not_cancel_the_query_for_the_others(embedder, store, leaver):
    service = serve(store, embedder)
    asked = [asyncio.create_task(service.search(["salt"], 3)) for _ in range(3)]
    await asyncio.sleep(0)
    asked.pop(leaver).cancel()
    for (hits,) in await asyncio.gather(*asked):
        assert len(hits.documents) == 3


@in_a_loop
async def test_the_last_caller_that_leaves_cancels_the_query(embedder, store):
    service = serve(store, embedder)
    asked = [asyncio.create_task(service.search(["salt"], 3)) for _ in range(2)]
    await asyncio.sleep(0)
    (query,) = service._flights.values()
    for task, is_cancelled in zip(asked, (False, True), strict=True):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert query.future.cancelled() == is_cancelled
    assert len((await service.search(["salt"], 3))[0].documents) == 3  # a later caller starts a new query


@in_a_loop
async def test_a_failure_reaches_all_waiting_callers_and_is_not_cached(embedder, store, monkeypatch):
    def fail(*_: object) -> None:
        raise StoreUnavailable("folder gone")

    service = serve(store, embedder)
    with monkeypatch.context() as patch:
        patch.setattr(store, "query", fail)
        asked = (service.search(["salt"], 3) for _ in range(3))
        failures = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(failure, Unavailable) for failure in failures)
    assert len((await service.search(["salt"], 3))[0].documents) == 3


@in_a_loop
async def test_a_refused_request_leaves_the_flights_it_had_joined(embedder, store):
    service = serve(store, embedder, batch=BatchLimits(queue=1))
    first = asyncio.create_task(service.search(["salt"], 3))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="overloaded"):
        await service.search(["salt", "another"], 3)
    assert service._flights["salt", 3].waiters == 1
    await first


# --- memory ---


@in_a_loop
async def test_a_full_cache_holds_as_many_bytes_as_its_metric_reports_and_the_limit_allows(embedder, store):
    service = serve(store, embedder, cache_bytes=2 << 20)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(5000):
            text = f"a query of the usual length, number {number}"
            service._cache[text, 3] = text, Hits((bytes(1000),), (float(number),))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = service.metrics.registry.get_sample_value("retrieval_cache_bytes")
    assert 0.99 * (2 << 20) < held <= 2 << 20 and used <= 1.05 * held


@in_a_loop
async def test_an_answer_larger_than_the_cache_is_given_and_not_cached(embedder, store):
    service = serve(store, embedder, cache_bytes=500)
    for _ in range(2):
        (hits,) = await service.search(["salt"], 3)
        assert len(hits.documents) == 3
    assert counted(service, "cache_hits") == 0
