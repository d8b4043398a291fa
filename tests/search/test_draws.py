"""Documents drawn from an index: any order is as good as another, and no more is read than is asked for."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chroma_parts import NAME, build, chroma_server, text_of, unit_vectors, written_index
from conftest import unused_port
from scipy.stats import chisquare

from search.chroma.location import ChromaPlace, connect
from search.chroma.store import (
    DRAW,
    CollectionInfo,
    draw_from,
    draw_of,
    get_collection,
    iter_documents,
    open_collection,
)

COUNT = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("draws") / "chroma"
    written_index(place, [text_of(number) for number in range(COUNT)], unit_vectors(0, COUNT))
    return place


@pytest.fixture
def read(monkeypatch):
    """How many records each call of Chroma has returned the texts of."""
    returned: list[int] = []
    own = chromadb.Collection.get

    def counting(self: chromadb.Collection, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        returned.append(len(found["documents"] or []))
        return found

    monkeypatch.setattr(chromadb.Collection, "get", counting)
    yield returned


def in_order(place: Path | str, seed: int) -> Iterator[tuple[str, str, str]]:
    return draw_from([(ChromaPlace.parse(place), NAME)], seed)


def test_draws_of_similar_ids_are_spread_evenly():
    counts = Counter(draw_of(f"document-{number}") % 64 for number in range(64_000))
    assert chisquare([counts[part] for part in range(64)]).pvalue > 1e-3


def test_each_document_comes_once_in_an_order_that_the_seed_decides(folder):
    first, again, other = (list(in_order(folder, seed)) for seed in (1, 1, 2))
    assert sorted(first) == list(iter_documents(folder, NAME))
    assert first == again != other


def test_a_server_gives_the_order_of_a_folder(folder, tmp_path):
    with chroma_server(tmp_path / "server", unused_port()) as server:
        written_index(server.url, [text_of(number) for number in range(COUNT)], unit_vectors(0, COUNT))
        assert list(in_order(server.url, 3)) == list(in_order(folder, 3))


def test_the_first_documents_are_found_without_reading_the_others(folder, read):
    assert len(list(islice(in_order(folder, 0), 5))) == 5
    assert sum(read) < COUNT / 10
    assert len(read) == 2


def test_a_new_index_says_that_its_records_have_draws(folder):
    with open_collection(folder, NAME) as store:
        stored = store.collection.get(limit=10, include=["metadatas"])
    assert [metadata[DRAW] for metadata in stored["metadatas"] or []] == [
        draw_of(key) for key in stored["ids"]
    ]


def test_an_index_of_an_earlier_version_is_opened_and_has_none(tmp_path):
    build(tmp_path / "chroma", count=20)
    with connect(tmp_path / "chroma") as client:
        handle = get_collection(client, tmp_path / "chroma", NAME)
        earlier = {key: value for key, value in (handle.metadata or {}).items() if key != "draws"}
        handle.modify(metadata=earlier)
        assert "draws" not in (handle.metadata or {})
    info = CollectionInfo.from_metadata(earlier)
    assert info is not None and info.draws == 0
