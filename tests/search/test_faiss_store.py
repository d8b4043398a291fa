"""FAISS indices as they are published: right answers with their passages, or one error with what to do."""

import gzip
import os
import shutil
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from chroma_parts import build as build_chroma
from chroma_parts import unit_vectors
from faiss_parts import contents_of, made, publish, write_corpus
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny_embedder import save_tiny_embedder

from search.chroma.store import open_collection
from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.faiss.jsonl_passages import JsonlPassages, StoredPassage
from search.faiss.store import FaissIndex, FaissStore, on_device

COUNT = 500


@pytest.fixture(scope="module")
def vectors():
    return unit_vectors(0, COUNT)


@pytest.fixture
def path(tmp_path, vectors):
    return publish(tmp_path / "wiki", vectors)


@pytest.fixture
def store(path):
    with closing(FaissIndex(path).open()) as opened:
        yield opened


def refusal(path: Path, corpus: Path | None = None, kind: type[StoreError] = StoreError) -> str:
    with pytest.raises(kind) as caught:
        FaissIndex(path, corpus).open()
    return str(caught.value)


def texts(store: FaissStore, queries: np.ndarray, topk: int) -> list[list[str]]:
    return [[hit["document"]["contents"] for hit in hits] for hits in store.query(queries, topk)]


# --- answers ---


@pytest.mark.parametrize("kind", ["flat", "l2"])
@given(seed=st.integers(0, 2**16), count=st.integers(1, 60), topk=st.integers(1, 80))
def test_a_flat_index_gives_what_exact_search_gives(tmp_path_factory, kind, seed, count, topk):
    """All passages once, if there are fewer; scores are cosines, also of an index by L2."""
    stored, queries = unit_vectors(seed, count), unit_vectors(seed + 1, 5)
    path = publish(tmp_path_factory.mktemp("flat") / "wiki", stored, kind)
    with closing(FaissIndex(path).open()) as store:
        found = store.query(queries, topk)
    cosines = queries @ stored.T
    best = np.argsort(-cosines, axis=1)[:, :topk]
    assert [[hit["document"]["contents"] for hit in hits] for hits in found] == [
        [contents_of(row) for row in rows] for rows in best
    ]
    scores = np.array([[hit["score"] for hit in hits] for hits in found])
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, best, axis=1), atol=1e-5)


@pytest.mark.parametrize("kind", ["hnsw", "IVF8,Flat", "SQfp16", "RR8,IVF4,Flat"])
def test_every_kind_of_index_that_the_field_shares_gives_a_passage_for_itself(tmp_path, vectors, kind):
    with closing(FaissIndex(publish(tmp_path / "wiki", vectors, kind)).open()) as store:
        hits = store.query(vectors[:20], 5)
    assert [
        contents_of(row) in [hit["document"]["contents"] for hit in of] for row, of in enumerate(hits)
    ] == [True] * 20


def test_title_and_text_stand_apart_and_contents_as_they_are_written(store, vectors):
    ((hit,),) = store.query(vectors[7:8], 1)
    assert hit["document"] == {
        "title": "Title 7",
        "text": "Text 7 – of\ntwo lines.",
        "contents": contents_of(7),
        "id": "7",
    }


def test_a_corpus_with_title_and_text_of_their_own_is_read_as_well(path, vectors):
    corpus = path.with_name("wiki-18.jsonl")
    corpus.write_text("".join(f'{{"id": {row}, "title": "T{row}", "text": "x"}}\n' for row in range(COUNT)))
    with closing(FaissIndex(path).open()) as store:
        ((hit,),) = store.query(vectors[7:8], 1)
    assert hit["document"] == {"title": "T7", "text": "x", "contents": "T7\nx", "id": "7"}


def test_documents_come_in_the_order_of_rows_or_are_drawn_each_once_in_one_that_the_seed_decides(path):
    index = FaissIndex(path)
    assert list(index.documents())[3] == ("3", "Title 3", "Text 3 – of\ntwo lines.")
    first, again, other = (list(index.drawn(seed)) for seed in (1, 1, 2))
    assert sorted(first) == sorted(index.documents())
    assert first == again != other


def test_every_document_is_as_likely_to_be_among_the_first_drawn(path):
    drawn = Counter(key for seed in range(150) for key, *_ in islice(FaissIndex(path).drawn(seed), 20))
    assert chisquare([drawn[str(row)] for row in range(COUNT)]).pvalue > 1e-3


def test_no_more_lines_are_read_than_documents_are_drawn(path, monkeypatch):
    read: list[int] = []
    own = JsonlPassages.__getitem__

    def counting(self: JsonlPassages, row: int) -> StoredPassage:
        read.append(row)
        return own(self, row)

    monkeypatch.setattr(JsonlPassages, "__getitem__", counting)
    of_the_opening = 3
    assert len(list(islice(FaissIndex(path).drawn(0), 5))) == 5 == len(read) - of_the_opening


def test_passages_and_documents_are_found_by_id(store):
    assert store.passages_of(["3", "nobody"]) == {"3": "Title 3\nText 3 – of\ntwo lines."}
    assert store.documents_among(["3", "nobody"]) == {"3"}


# --- what cannot be served ---


@pytest.mark.parametrize("kind", ["flat", "hnsw", "IVF8,PQ4"])
def test_an_index_cut_off_anywhere_is_named(tmp_path, vectors, kind):
    path = publish(tmp_path / "wiki", vectors, kind)
    whole = path.read_bytes()
    # Each byte of the header, where FAISS's own mapped reader crashes, some later bytes, and the end.
    end = len(whole)
    for size in [*range(120), *range(120, end, end // 20), *range(end - 9, end)]:
        path.write_bytes(whole[:size])
        assert f"{path} is no FAISS index, or is cut off" in refusal(path, kind=StoreNotReady)


def test_a_missing_index_is_named_with_how_to_make_one(tmp_path):
    assert "prepare-data index=faiss" in refusal(tmp_path / "e5_Flat.index", kind=StoreNotReady)


def test_a_missing_corpus_is_named(path):
    path.with_name("wiki-18.jsonl").unlink()
    assert "faiss.corpus=" in refusal(path, kind=StoreNotReady)
    assert "correct faiss.corpus" in refusal(path, path.with_name("other.jsonl"), StoreNotReady)


def test_of_two_corpora_one_has_to_be_named(path):
    shutil.copy(path.with_name("wiki-18.jsonl"), path.with_name("other.jsonl"))
    assert "(other.jsonl, wiki-18.jsonl): name the one with faiss.corpus=" in refusal(path)
    FaissIndex(path, path.with_name("other.jsonl")).open().close()


def test_a_compressed_corpus_is_to_be_unpacked(path):
    packed = path.with_name("wiki-18.jsonl.gz")
    packed.write_bytes(gzip.compress(path.with_name("wiki-18.jsonl").read_bytes()))
    assert "unpack it (gunzip)" in refusal(path, packed)


@pytest.mark.parametrize("lines", [COUNT - 1, COUNT + 1])
def test_an_index_and_a_corpus_of_other_lengths_are_refused(path, lines):
    write_corpus(path.with_name("wiki-18.jsonl"), [contents_of(row) for row in range(lines)])
    assert f"{COUNT} rows and {path.with_name('wiki-18.jsonl')} {lines} lines" in refusal(path)


@pytest.mark.parametrize("line", ['{"id": "0", "conte', '{"id": "0"}', "[]", '{"id": "0", "contents": 7}'])
def test_a_line_that_is_no_passage_is_named_by_its_number(path, line):
    corpus = path.with_name("wiki-18.jsonl")
    corpus.write_text(corpus.read_text().replace(corpus.read_text().partition("\n")[0], line, 1))
    assert f"{corpus} line 1 is no passage" in refusal(path)


def test_an_index_with_ids_of_its_own_is_refused(path, vectors):
    index: Any = faiss.IndexIDMap2(made("flat", vectors[:0]))
    index.add_with_ids(vectors, np.arange(COUNT) + 10**6)
    faiss.write_index(index, str(path))
    assert "is of a kind (IndexIDMap2" in refusal(path)


def test_an_empty_index_is_refused(tmp_path):
    path = publish(tmp_path / "wiki", unit_vectors(0, 0), contents=())
    assert "0 rows" in refusal(path)


def test_a_chroma_folder_is_no_faiss_index_and_the_other_way_round(tmp_path, path):
    build_chroma(tmp_path / "chroma", count=3)
    assert f"set index=chroma chroma.path={tmp_path / 'chroma'}" in refusal(tmp_path / "chroma")
    with pytest.raises(StoreError, match=f"set index=faiss faiss.path={path.parent}"):
        open_collection(path.parent, "wiki")


# --- files that change under a service ---


def test_an_index_that_is_gone_is_unavailable_until_it_is_back(store, path, vectors):
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable, match="is gone"):
        store.query(vectors[:1], 1)
    path.with_name("elsewhere").rename(path)
    assert texts(store, vectors[:1], 1) == [[contents_of(0)]]


def test_an_index_that_is_cut_off_under_a_service_is_unavailable_until_it_is_whole(store, path, vectors):
    whole = path.read_bytes()
    os.truncate(path, 1000)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="is cut off"):
            store.query(vectors[:1], 1)
    path.write_bytes(whole)
    assert texts(store, vectors[:1], 1) == [[contents_of(0)]]


def test_another_index_in_its_place_is_refused_until_a_restart(store, path, vectors):
    faiss.write_index(made("flat", unit_vectors(1, COUNT)), str(path.with_name("new")))
    path.with_name("new").replace(path)
    with pytest.raises(StoreUnavailable, match="another version now"):
        store.query(vectors[:1], 1)


# --- the lines of a corpus ---


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip), min_size=1))
def test_each_line_is_read_by_its_number_with_and_without_a_last_line_break(tmp_path_factory, contents):
    path = write_corpus(tmp_path_factory.mktemp("lines") / "corpus.jsonl", contents)
    for _ in range(2):
        with closing(JsonlPassages(path)) as passages:
            assert len(passages) == len(contents)
            assert [passages[row].contents for row in range(len(contents))] == contents
            assert [passage.contents for passage in passages] == contents
        path.write_bytes(path.read_bytes().rstrip(b"\n"))


def test_a_corpus_that_was_changed_is_gone_through_again(tmp_path):
    path = write_corpus(tmp_path / "corpus.jsonl", ["one", "two"])
    JsonlPassages(path).close()
    write_corpus(path, ["one", "a second", "three"])
    with closing(JsonlPassages(path)) as passages:
        assert [passage.contents for passage in (passages[1], passages[2])] == ["a second", "three"]


def test_lines_of_a_corpus_in_a_read_only_folder_are_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    path = write_corpus(tmp_path / "shared" / "corpus.jsonl", ["one", "two"])
    write_text = Path.open

    def refusing(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:  # root may write anywhere
        if self.parent == path.parent and "w" in mode:
            raise OSError(30, "Read-only file system", str(self))
        return write_text(self, mode, *more, **options)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(StoreError, match="make one writable"):
        JsonlPassages(path)
    with closing(JsonlPassages(path, tmp_path / "lines")) as passages:
        assert passages[1].contents == "two"
    assert len(list((tmp_path / "lines").iterdir())) == 1


# --- embedders ---


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return Embedder(save_tiny_embedder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize("kind", ["flat", "hnsw", "SQfp16", "IVF4,PQ8x4"])
def test_the_embedder_that_made_the_vectors_is_accepted(tmp_path, embedder, kind):
    contents = [contents_of(row) for row in range(300)]
    path = publish(tmp_path / "wiki", embedder.encode_passages(contents), kind, contents)
    with closing(FaissIndex(path).open()) as store:
        store.check_embedder(embedder)


@pytest.mark.parametrize(
    ("vectors_of", "said"),
    [
        (lambda embedder, texts: unit_vectors(0, len(texts), 32), r"Set retrieval\.embedder"),
        (lambda embedder, texts: unit_vectors(0, len(texts), 16), "they have 16 numbers, its own 32"),
        (lambda embedder, texts: 3 * embedder.encode_passages(texts), "not of unit vectors"),
    ],
    ids=["of another model", "of another dimension", "not of length one"],
)
def test_other_vectors_are_refused(tmp_path, embedder, vectors_of, said):
    contents = [contents_of(row) for row in range(10)]
    path = publish(tmp_path / "wiki", vectors_of(embedder, contents), contents=contents)
    with closing(FaissIndex(path).open()) as store, pytest.raises(StoreError, match=said):
        store.check_embedder(embedder)


def test_without_a_faiss_for_gpus_the_index_stays_on_the_cpu_with_a_line(vectors, caplog):
    index = made("flat", vectors)
    assert on_device(index, "cuda:0", 1) is index
    assert "searched on the CPU, not on cuda:0: this FAISS is built for CPUs" in caplog.text
