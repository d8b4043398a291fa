"""A Chroma server's limits are respected: queries at once over all shards, and records per call."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import chromadb
import numpy as np
import pytest
from chroma_parts import chroma_server
from conftest import unused_port
from hypothesis import given
from hypothesis import strategies as st
from index_builds import harbour_corpus

from search.chroma.location import ChromaPlace, Quota
from search.chroma.sharded_store import chroma_index
from search.indexing.shards import Shards, build

SHARDS, PAGE, READS = 3, 7, 2


class Counted:
    """How many are inside at once, at most."""

    def __init__(self) -> None:
        self.most, self._inside, self._lock = 0, 0, threading.Lock()

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        time.sleep(0.002)  # a chance for more than may to be seen
        yield
        with self._lock:
            self._inside -= 1


@given(reads=st.integers(1, 4), threads=st.integers(1, 8))
def test_no_more_read_at_once_than_may(reads, threads):
    counted = Counted()

    def read(number: int) -> None:
        with Quota(reads=reads).reading("http://one"), counted.inside():
            pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(2 * threads)))
    assert counted.most <= min(reads, threads)


def test_without_a_limit_all_read_at_once():
    barrier = threading.Barrier(8)

    def read(number: int) -> None:
        with Quota().reading("http://one"):
            barrier.wait(10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with chroma_server(tmp_path_factory.mktemp("quota") / "chroma", unused_port()) as started:
        yield started


def test_an_index_on_a_server_is_written_and_asked_within_its_quota(server, tiny, tmp_path, monkeypatch):
    written: list[int] = []
    counted = Counted()
    upsert, query = chromadb.Collection.upsert, chromadb.Collection.query

    def upserting(self: Any, ids: list[str], **rest: Any) -> None:
        written.append(len(ids))
        upsert(self, ids=ids, **rest)

    def querying(self: Any, **rest: Any) -> Any:
        with counted.inside():
            return query(self, **rest)

    monkeypatch.setattr(chromadb.Collection, "upsert", upserting)
    monkeypatch.setattr(chromadb.Collection, "query", querying)
    place = replace(ChromaPlace.parse(server.url), quota=Quota(PAGE, READS))
    index = chroma_index([place], "wiki", SHARDS)
    report = build(harbour_corpus(tmp_path / "corpus.jsonl", 40), Shards(index), tiny)
    assert sum(written) == report.info.chunks and max(written) == PAGE
    vectors = np.random.default_rng(0).normal(size=(4, report.info.dimension)).astype(np.float32)
    with closing(index.open()) as store, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: store.query(vectors, 3), range(8)))
    assert answers[1:] == answers[:-1]
    assert counted.most <= READS
