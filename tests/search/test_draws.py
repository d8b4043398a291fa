"""Documents drawn from an index: any order is as good as another, and no more is read than is asked for."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chroma_parts import NAME, chroma_server, text_of, unit_vectors, written_index
from conftest import unused_port
from scipy.stats import chisquare

from search.chroma.location import ChromaPlace, Quota
from search.chroma.store import (
    draw_from,
    draw_of,
    iter_documents,
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


def in_order(place: ChromaPlace | Path | str, seed: int) -> Iterator[tuple[str, str, str]]:
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
        in_pages = ChromaPlace.parse(server.url).within(Quota(page=7))
        assert list(in_order(in_pages, 3)) == list(in_order(folder, 3))


def test_the_first_documents_are_found_without_reading_the_others(folder, read):
    assert len(list(islice(in_order(folder, 0), 5))) == 5
    assert sum(read) < COUNT / 10
    assert len(read) == 2
