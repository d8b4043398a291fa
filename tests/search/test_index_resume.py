"""Indexing that is killed and run again: a real process, SIGKILL, and the same collection as without it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chroma_parts import chroma_server
from conftest import unused_port
from index_builds import collection_contents, die_at, harbour_corpus, killed

from drzero.ops.files import AlreadyWriting, sole_writer
from search.chroma.store import open_collection
from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.indexing.build import IndexReport
from search.indexing.chunking import Chunking, ChunkingError
from search.indexing.journal import IndexJournal
from search.indexing.shards import build_index

# Three units of chunks. A kill at the third call finds two complete.
DOCUMENTS, CHUNKING = 560, Chunking(64, 8)
KILLED_IN = ("splitting", "embedding", "writing", "publishing")


def index(source: Path, target: Path | str, tiny: EmbedderSpec) -> IndexReport:
    return build_index(source, target, "wiki", tiny, chunking=CHUNKING)


def run_and_die(where: str, source: Path, target: Path | str, tiny: EmbedderSpec) -> None:
    import chromadb

    points: dict[str, tuple[Any, str, int]] = {
        "splitting": (IndexJournal, "add_chunks", 3),
        "embedding": (Embedder, "encode_passages", 3),
        "writing": (chromadb.Collection, "upsert", 3),
        "publishing": (Path, "rename", 2 if Path(target).exists() else 1),
    }
    die_at(*points[where])
    index(source, target, tiny)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny):
    """A collection indexed in one undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    index(harbour_corpus(folder / "corpus.jsonl", DOCUMENTS), folder / "chroma", tiny)
    return folder / "chroma"


@pytest.fixture(scope="module")
def updated(tmp_path_factory, tiny, built):
    """The same with twice the documents, added in one undisturbed run."""
    folder = tmp_path_factory.mktemp("updated")
    shutil.copytree(built, folder / "chroma")
    index(harbour_corpus(folder / "corpus.jsonl", 2 * DOCUMENTS), folder / "chroma", tiny)
    return folder / "chroma"


@pytest.mark.parametrize("where", KILLED_IN)
def test_a_killed_and_repeated_build_gives_the_collection_of_one_undisturbed_run(
    where, tmp_path, tiny, built, encoded
):
    source, target = harbour_corpus(tmp_path / "corpus.jsonl", DOCUMENTS), tmp_path / "chroma"
    killed(run_and_die, where, source, target, tiny)
    assert not target.exists()
    report = index(source, target, tiny)
    assert collection_contents(target) == collection_contents(built)
    chunks = report.info.chunks
    assert len(encoded) == report.embedded == chunks - report.resumed
    assert {
        "splitting": len(encoded) == chunks,
        "embedding": 0 < len(encoded) <= chunks - 512,
        "writing": len(encoded) == 0,
        "publishing": len(encoded) == 0,
    }[where]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "corpus.jsonl"]


rest = pytest.mark.slow("the build killed there is in the first tier, above")


@pytest.mark.parametrize(
    "where", [pytest.param("embedding", marks=rest), "writing", pytest.param("publishing", marks=rest)]
)
def test_a_killed_update_leaves_the_old_collection_and_completes_when_repeated(
    where, tmp_path, tiny, built, updated, encoded
):
    source = harbour_corpus(tmp_path / "corpus.jsonl", 2 * DOCUMENTS)
    target = Path(shutil.copytree(built, tmp_path / "chroma"))
    killed(run_and_die, where, source, target, tiny)
    if where != "publishing":  # between its two renames the folder is away until the next run
        assert collection_contents(target) == collection_contents(built)
    report = index(source, target, tiny)
    assert collection_contents(target) == collection_contents(updated)
    assert report.resumed > 0 and len(encoded) == report.embedded
    assert (report.changes.added, report.changes.kept) == (DOCUMENTS, DOCUMENTS)


def test_vectors_of_a_killed_run_are_reused_although_the_corpus_has_changed(tmp_path, tiny, encoded):
    source, target = harbour_corpus(tmp_path / "corpus.jsonl", DOCUMENTS), tmp_path / "chroma"
    killed(run_and_die, "writing", source, target, tiny)
    index(harbour_corpus(source, DOCUMENTS + 10, 10), target, tiny)
    assert len(encoded) == 10
    assert collection_contents(target)[0].documents == DOCUMENTS + 10


def test_vectors_of_a_killed_run_under_other_settings_are_dropped_with_a_line(tmp_path, tiny, capsys):
    source, target = harbour_corpus(tmp_path / "corpus.jsonl", DOCUMENTS), tmp_path / "chroma"
    killed(run_and_die, "writing", source, target, tiny)
    report = build_index(source, target, "wiki", tiny, chunking=Chunking(64, 0))
    assert report.resumed == 0 and report.embedded == report.info.chunks
    assert "chunks that a run with another model or chunk size had embedded" in capsys.readouterr().out


def test_a_refused_run_keeps_the_vectors_of_a_killed_one(tmp_path, tiny, built):
    source = harbour_corpus(tmp_path / "corpus.jsonl", 2 * DOCUMENTS)
    target = Path(shutil.copytree(built, tmp_path / "chroma"))
    killed(run_and_die, "writing", source, target, tiny)
    with pytest.raises(StoreError, match="--replace"):
        build_index(source, target, "wiki", tiny, chunking=Chunking(64, 0))
    with pytest.raises(ChunkingError, match="too little"):
        build_index(source, target, "wiki", tiny, chunking=Chunking(400, 100), replace=True)
    assert index(source, target, tiny).embedded == 0


def test_a_second_build_of_a_servers_collection_at_the_same_time_is_refused(tmp_path, tiny):
    source = harbour_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)
    place = f"http://127.0.0.1:{unused_port()}"
    with (
        sole_writer(f"collection 'wiki' in {place}"),
        pytest.raises(AlreadyWriting, match=f"writing collection 'wiki' in {place}: wait"),
    ):
        index(source, place, tiny)


def test_a_server_refuses_a_half_written_collection_and_a_repeated_build_completes_it(
    tmp_path, tiny, built, encoded
):
    source = harbour_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)
    with chroma_server(tmp_path / "server", unused_port()) as server:
        killed(run_and_die, "embedding", source, server.url, tiny)
        with pytest.raises(StoreError, match="is being indexed"):
            open_collection(server.url, "wiki")
        report = index(source, server.url, tiny)
        assert collection_contents(server.url) == collection_contents(built)
        assert 0 < len(encoded) == report.embedded <= report.info.chunks - 512
        assert not index(source, server.url, tiny).built


def test_a_document_of_many_chunks_is_embedded_in_parts_of_which_a_kill_loses_one(
    tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr("search.indexing.build.TOGETHER", 4)
    record = {"id": "one", "text": "Passage 0 tells of the harbour. " * 300}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(record))
    encode, calls = Embedder.encode_passages, iter(range(10**6))

    def interrupted(self: Embedder, texts: Sequence[str]) -> np.ndarray:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(Embedder, "encode_passages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index(tmp_path / "corpus.jsonl", tmp_path / "chroma", tiny)
    assert index(tmp_path / "corpus.jsonl", tmp_path / "chroma", tiny).resumed == 8
