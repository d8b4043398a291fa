"""FAISS indices built here: the answers of Chroma over the same corpus, resumed after a kill, and updated."""

from contextlib import closing
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from chroma_parts import written_target
from index_builds import die_at, harbour_corpus, killed
from tiny_embedder import save_tiny_embedder

from drzero.ops.errors import UserError
from search.chroma.sharded_store import chroma_index
from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.faiss.location import CORPUS_FILE, RECORD, FaissFiles
from search.faiss.store import FaissIndex
from search.indexing.build import BuildOptions, IndexReport
from search.indexing.chunking import Chunking, document_of
from search.indexing.faiss_folder import FaissFolder
from search.indexing.shards import build, build_index, chroma_target
from search.indexing.size import KINDS
from search.stored_index import INDEX_FILE, Index

DOCUMENTS, CHUNKING = 300, Chunking(64, 8)
FILES = (INDEX_FILE, CORPUS_FILE, RECORD)


def index(source: Path, folder: Path, tiny: EmbedderSpec, kind: str = "flat") -> IndexReport:
    return build(source, FaissFolder(folder, kind), tiny, BuildOptions(chunking=CHUNKING))


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def hits(place: Index, queries: np.ndarray, topk: int) -> list[list[tuple[Any, float]]]:
    with closing(place.open()) as store:
        return [[(hit["document"], hit["score"]) for hit in found] for found in store.query(queries, topk)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return harbour_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", DOCUMENTS)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny, source):
    folder = tmp_path_factory.mktemp("built") / "faiss"
    index(source, folder, tiny)
    return folder


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_answers_are_those_of_chroma_over_the_same_corpus(tmp_path, tiny, source, built, kind):
    build_index(source, tmp_path / "chroma", "wiki", tiny, chunking=CHUNKING)
    index(source, tmp_path / "faiss", tiny, kind)
    queries = Embedder(tiny).encode_queries(["harbour of 7919", "passage 40", "title 7", "of the sea"])
    chroma, ours_in_faiss = chroma_index([tmp_path / "chroma"], "wiki"), FaissIndex(tmp_path / "faiss")
    for ours, theirs in zip(hits(ours_in_faiss, queries, 5), hits(chroma, queries, 5), strict=True):
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)
        assert ours[0][0] == theirs[0][0]
    with closing(chroma.open()) as one, closing(ours_in_faiss.open()) as other:
        assert one.info == changed(other.info, draws=one.info.draws)
    assert sorted(ours_in_faiss.documents()) == sorted(chroma.documents())


def test_what_was_embedded_alone_is_written_by_the_next_build(tmp_path, tiny, source, built, encoded):
    target = FaissFolder(tmp_path / "faiss")
    first = build(source, target, tiny, BuildOptions(chunking=CHUNKING, embed_only=True))
    assert (first.is_written, first.embedded, target.folder.exists()) == (False, len(encoded), False)
    assert index(source, target.folder, tiny).resumed == first.embedded == len(encoded)
    assert contents(target.folder) == contents(built)


def test_a_server_is_written_as_it_is_embedded(tiny, source):
    server = chroma_target(["http://127.0.0.1:9"], "wiki")
    with pytest.raises(StoreError, match=r"leave out indexing\.embed_only"):
        build(source, server, tiny, BuildOptions(embed_only=True))


def clustered(seed: int, count: int, dimension: int = 64, clusters: int = 100) -> np.ndarray:
    """Unit vectors (count, dimension) around centres, like texts on so many subjects."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dimension))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    noise = 0.6 / np.sqrt(dimension) * rng.normal(size=(count, dimension))
    vectors = centres[rng.integers(0, clusters, count)] + noise
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


# Of the ten nearest by exact search, the share among the first `topk`. HNSW inspects 256 candidates of
# 3,000 vectors and lost none in three seeds. A code has a byte for four numbers, which mixes up neighbours
# within a cluster (0.75 of ten in ten, in three seeds) and does not lose them (all of ten in fifty).
@pytest.mark.parametrize(
    ("kind", "topk", "least"), [("hnsw", 10, 0.99), ("ivfpq", 10, 0.6), ("ivfpq", 50, 0.95)]
)
def test_an_approximate_index_finds_what_exact_search_finds(tmp_path, kind, topk, least):
    stored, queries = np.split(clustered(0, 3200), [3000])
    written_target(FaissFolder(tmp_path / "faiss", kind), [f"text {row}" for row in range(3000)], stored)
    with closing(FaissIndex(tmp_path / "faiss").open()) as store:
        found = [{hit["document"]["text"] for hit in of} for of in store.query(queries, topk)]
    best = np.argsort(-(queries @ stored.T), axis=1)[:, :10]
    shared = sum(
        len({f"text {row}" for row in rows} & texts) for rows, texts in zip(best, found, strict=True)
    )
    assert shared / best.size >= least


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedder_of_a_build_is_recorded_and_checked(tmp_path, tiny, source, kind, tmp_path_factory):
    index(source, tmp_path / "faiss", tiny, kind)
    other = save_tiny_embedder(tmp_path_factory.mktemp("other") / Path(tiny.name).name, seed=1)
    with closing(FaissIndex(tmp_path / "faiss").open()) as store:
        assert store.check_content()
        store.check_embedder(Embedder(tiny))
        with pytest.raises(StoreError, match=r"another embedder than .*: its model is"):
            store.check_embedder(Embedder(EmbedderSpec("packaged-minilm", "cpu")))
        if kind != "ivfpq":
            with pytest.raises(StoreError, match="the same text gets another vector"):
                store.check_embedder(Embedder(other))


def test_chunks_of_a_document_are_found_by_its_id(built):
    with closing(FaissIndex(built).open()) as store:
        assert store.documents_among(["d0", "d1", "nobody"]) == {"d0", "d1"}
    parts = [key for key, _, _ in FaissIndex(built).documents() if document_of(key) == "d0"]
    assert len(parts) > 1


def test_an_unchanged_corpus_changes_nothing(built, tiny, source, encoded):
    before = contents(built)
    assert not index(source, built, tiny).built
    assert contents(built) == before and len(encoded) == 0


def test_an_update_embeds_what_is_new_and_gives_what_a_build_from_scratch_gives(
    tmp_path, tiny, source, encoded
):
    index(source, tmp_path / "faiss", tiny)
    before = len(encoded)
    report = index(harbour_corpus(tmp_path / "more.jsonl", DOCUMENTS + 20, 30), tmp_path / "faiss", tiny)
    assert report.changes is not None and report.changes.added == 20
    assert 0 < len(encoded) - before == report.embedded < report.info.chunks / 2
    index(tmp_path / "more.jsonl", tmp_path / "scratch", tiny)
    updated, scratch = (tmp_path / name / CORPUS_FILE for name in ("faiss", "scratch"))
    assert updated.read_bytes() == scratch.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"faiss", "scratch", "more.jsonl"}


def test_another_kind_of_the_same_corpus_is_made_of_the_vectors_that_are_there(
    tmp_path, tiny, source, encoded
):
    index(source, tmp_path / "faiss", tiny)
    before = len(encoded)
    assert index(source, tmp_path / "faiss", tiny, "hnsw").built
    assert len(encoded) == before


def test_too_few_chunks_for_ivfpq_are_refused(tmp_path, tiny):
    corpus = harbour_corpus(tmp_path / "corpus.jsonl", 20)
    with pytest.raises(StoreError, match="ivfpq needs 256 chunks"):
        index(corpus, tmp_path / "faiss", tiny, "ivfpq")
    assert not (tmp_path / "faiss").exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path, tiny, source):
    (tmp_path / "faiss").mkdir()
    (tmp_path / "faiss" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is no FAISS index that was built here"):
        index(source, tmp_path / "faiss", tiny)
    assert (tmp_path / "faiss" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [INDEX_FILE, CORPUS_FILE])
def test_a_changed_byte_is_found_before_it_is_served(tmp_path, tiny, source, name):
    index(source, tmp_path / "faiss", tiny)
    path = tmp_path / "faiss" / name
    data = bytearray(path.read_bytes())
    data[data.rfind(b"harbour") if name == CORPUS_FILE else -3] ^= 1
    path.write_bytes(data)
    with (
        closing(FaissIndex(tmp_path / "faiss").open()) as store,
        pytest.raises(StoreError, match="is damaged"),
    ):
        store.check_content()


KILLED_IN: dict[str, tuple[Any, str, int]] = {
    "adding": (faiss.IndexFlatIP, "add", 2),
    "writing": (FaissFiles, "write_record", 1),
    "publishing": (Path, "rename", 1),
}


def run_and_die(where: str, source: Path, folder: Path, tiny: EmbedderSpec) -> None:
    die_at(*KILLED_IN[where])
    index(source, folder, tiny)


@pytest.mark.parametrize("where", KILLED_IN)
def test_a_build_killed_at_the_write_is_resumed_to_the_same_files(
    tmp_path, tiny, source, built, where, encoded
):
    killed(run_and_die, where, source, tmp_path / "faiss", tiny)
    assert not (tmp_path / "faiss").exists()
    report = index(source, tmp_path / "faiss", tiny)
    assert len(encoded) == 0 and report.resumed == report.info.chunks
    assert contents(tmp_path / "faiss") == contents(built)
    assert [path.name for path in tmp_path.iterdir()] == ["faiss"]
