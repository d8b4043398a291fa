"""An index in shards, asked as one: a real Chroma in each."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import chromadb
import numpy as np
import pytest
from chroma_parts import unit_vectors, written_target
from hypothesis import given, settings
from hypothesis import strategies as st

from search.chroma.location import connect
from search.chroma.sharded_store import chroma_index, merge, shard_of
from search.chroma.store import HNSW
from search.errors import StoreError, StoreUnavailable
from search.indexing.collection import Collection
from search.indexing.shards import Shards
from search.serving.encoders import EncoderPool
from search.serving.metrics import Metrics
from search.serving.service import Retrieval
from search.stored_index import Index
from search.wire import ScoredPassage, make_passage

COUNT, NAME = 400, "wiki"
VECTORS = unit_vectors(0, COUNT)
QUERIES = unit_vectors(1, 50)


def hit(number: int, score: float) -> ScoredPassage:
    return {"document": make_passage(str(number), f"title {number}", f"text {number}"), "score": score}


def exact(vectors: np.ndarray, numbers: Sequence[int], query: np.ndarray, topk: int) -> list[ScoredPassage]:
    """Exact search over the documents of these numbers."""
    hits = [hit(number, float(vectors[number] @ query)) for number in numbers]
    return sorted(hits, key=lambda one: (-one["score"], one["document"]["title"]))[:topk]


def write(folder: Path, shards: int) -> None:
    """Write documents 0 to COUNT at their VECTORS, each to its shard."""
    folder.mkdir()
    for number, target in enumerate(Shards(chroma_index([folder], NAME, shards)).collections("whole")):
        rows = [row for row in range(COUNT) if shard_of(str(row), shards) == number]
        written_target(target, {row: f"text {row}" for row in rows}, VECTORS[rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same documents in one collection, in two shards and in four."""
    root = tmp_path_factory.mktemp("shards")
    found = {shards: root / str(shards) for shards in (1, 2, 4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HNSW, "batch_size", 50)  # Chroma compares with the last batch one by one
        for shards, folder in found.items():
            write(folder, shards)
    return found


@pytest.fixture
def four(folders, tmp_path):
    """A copy of the four shards, to be damaged."""
    return Path(shutil.copytree(folders[4], tmp_path / "chroma"))


@pytest.fixture
def opened(four):
    with closing(chroma_index([four], NAME, 4).open()) as store:
        yield store


def refusal(folder: Path, shards: int) -> str:
    with pytest.raises(StoreError) as refused, closing(chroma_index([folder], NAME, shards).open()):
        pass
    return str(refused.value)


# --- merging ---


@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 40), st.integers(0, 60), st.booleans())
@settings(deadline=None)
def test_the_merged_answers_of_exact_shards_are_exact_search_over_all(seed, shards, topk, count, coarse):
    vectors, query = unit_vectors(seed, count + 1, 3), unit_vectors(seed + 1, 1, 3)[0]
    if coarse:  # many equal scores
        vectors, query = np.round(vectors), np.round(query)
    each = [
        [number for number in range(count) if shard_of(str(number), shards) == shard]
        for shard in range(shards)
    ]
    merged = merge([exact(vectors, some, query, topk) for some in each], topk)
    assert merged == exact(vectors, range(count), query, topk)


def test_the_shard_of_a_document_is_what_it_was_in_the_first_release():
    assert [shard_of(str(number), 4) for number in range(12)] == [2, 3, 3, 2, 3, 0, 3, 3, 0, 0, 0, 0]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_the_best_three_are_those_of_exact_search(folders, shards):
    with closing(chroma_index([folders[shards]], NAME, shards).open()) as store:
        answers = store.query(QUERIES, 3)
    found = total = 0
    for query, hits in zip(QUERIES, answers, strict=True):
        wanted = {one["document"]["title"] for one in exact(VECTORS, range(COUNT), query, 3)}
        found += len(wanted & {one["document"]["title"] for one in hits})
        total += len(wanted)
    assert found >= 0.99 * total


def test_a_topk_beyond_the_index_gives_every_document_once(opened):
    ((*hits,),) = opened.query(QUERIES[:1], COUNT + 1)
    assert len({one["document"]["title"] for one in hits}) == len(hits) == COUNT


# --- as one collection ---


class Encoders:
    """Gives query number n its vector."""

    ready = 1

    def __init__(self) -> None:
        self.on_ready: Callable[[], None] = lambda: None

    async def encode(self, texts: Sequence[str]) -> np.ndarray:
        return QUERIES[[int(text) for text in texts]]


async def wire(index: Index) -> list[bytes]:
    """The service's answers to all queries, as JSON with scores."""
    with closing(index.open()) as store:
        retrieval = Retrieval(store, cast(EncoderPool, Encoders()), Metrics())
        found = await retrieval.search([str(number) for number in range(len(QUERIES))], 5)
        await retrieval.batcher.close()
        return [hits.scored() for hits in found]


@pytest.mark.parametrize("shards", [2, 4])
def test_the_service_answers_as_from_one_collection(folders, shards):
    many = chroma_index([folders[shards]], NAME, shards)
    assert asyncio.run(wire(many)) == asyncio.run(wire(chroma_index([folders[1]], NAME)))


def test_documents_and_draws_come_in_the_order_of_one_collection(folders):
    one = chroma_index([folders[1]], NAME)
    for shards in (2, 4):
        many = chroma_index([folders[shards]], NAME, shards)
        assert list(many.documents()) == list(one.documents())
        assert list(many.drawn(7) or []) == list(one.drawn(7) or [])


def test_documents_are_found_by_their_ids_in_any_shard(opened):
    assert opened.passages_of(["3", "4", "none"]) == {"3": "title 3\ntext 3", "4": "title 4\ntext 4"}
    assert opened.documents_among(["5", "6", "none"]) == {"5", "6"}


def test_the_info_is_that_of_the_whole(opened):
    assert (opened.info.documents, opened.info.chunks, opened.info.version) == (COUNT, COUNT, "whole")
    assert (opened.name, opened.info.shard) == (NAME, "")


# --- a shard that cannot answer, or does not belong to the others ---


def test_a_shard_that_is_lost_between_queries_fails_the_query_by_its_name(opened, four):
    opened.query(QUERIES, 3)
    (four / "shard-02-of-04").rename(four / "away")
    with pytest.raises(StoreUnavailable, match=r"^shard-02-of-04: "):
        opened.query(QUERIES, 3)
    (four / "away").rename(four / "shard-02-of-04")
    assert len(opened.query(QUERIES, 3)) == len(QUERIES)


def test_a_shard_that_is_lost_amid_a_query_fails_it_by_its_name(opened, four, monkeypatch):
    query, shard = chromadb.Collection.query, four / "shard-01-of-04"

    def losing(self: chromadb.Collection, **asked: Any) -> Any:
        found = query(self, **asked)
        if self.metadata["shard"] == "1/4" and shard.exists():
            shard.rename(four / "away")
        return found

    monkeypatch.setattr(chromadb.Collection, "query", losing)
    with pytest.raises(StoreUnavailable, match=r"^shard-01-of-04: "):
        opened.query(QUERIES, 3)


def test_a_missing_shard_is_named(four):
    shutil.rmtree(four / "shard-03-of-04")
    assert refusal(four, 4).startswith("shard-03-of-04 of collection 'wiki' is missing in ")


@pytest.mark.parametrize(
    ("what", "value", "said"),
    [
        ("embedder", "other/one", "embedder is 'made/up' in shard-00-of-04 and 'other/one' in shard-02"),
        ("chunk_tokens", 7, "chunk_tokens is 256 in shard-00-of-04 and 7 in shard-02-of-04"),
        ("whole", "older", "shard-02-of-04 and shard-00-of-04 of "),
        ("shard", "2/8", "was built as shard 2/8, not 2/4"),
    ],
)
def test_a_shard_that_does_not_belong_to_the_others_is_named(four, what, value, said):
    with connect(four / "shard-02-of-04") as client:
        handle = client.get_collection(NAME, embedding_function=None)
        handle.modify(metadata=dict(handle.metadata) | {what: value})
    assert said in refusal(four, 4)


def test_another_number_of_shards_is_refused_with_what_to_do(folders):
    assert "holds an index of 4 shards, and chroma.shards is 2: set chroma.shards=4" in refusal(folders[4], 2)
    assert "holds an index of 4 shards, and chroma.shards is 1: set chroma.shards=4" in refusal(folders[4], 1)
    assert "holds an index without shards, and chroma.shards is 2: set chroma.shards=1" in refusal(
        folders[1], 2
    )
    with pytest.raises(StoreError, match=r"holds an index of 4 shards, and chroma.shards is 1"):
        Collection(chroma_index([folders[4]], NAME, 1).places[0], NAME).metadata()


def test_a_shard_is_not_served_as_if_it_were_the_whole(folders):
    assert "is shard 1/4 of an index" in refusal(folders[4] / "shard-01-of-04", 1)


@pytest.mark.parametrize("paths", [[], ["a", "a"], ["a", "b", "c"]])
def test_places_that_cannot_be_dealt_out_are_refused(paths):
    with pytest.raises(StoreError, match=r"for chroma.shards=2: name each place once"):
        chroma_index(paths, NAME, 2)


def test_several_places_get_a_shard_in_turn():
    index = chroma_index(["a", "http://127.0.0.1:9"], NAME, 3)
    shown = [f"{place} {name}" for place, name in map(index.place, range(3))]
    assert shown == ["a/shard-00-of-03 wiki", "http://127.0.0.1:9 wiki-01-of-03", "a/shard-02-of-03 wiki"]
