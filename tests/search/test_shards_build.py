"""Shards that are built, killed in three places each, and built again: the same index as without the kill."""

import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from index_builds import collection_contents, harbour_corpus, killed

import search.indexing.build
from search.chroma.sharded_store import chroma_index
from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.indexing.build import BuildOptions, IndexReport, Unwritten
from search.indexing.chunking import Chunking
from search.indexing.journal import IndexJournal
from search.indexing.shards import Shards, Writers, build, build_index
from search.indexing.size import Planned

DOCUMENTS, CHUNKING, SHARDS = 60, Chunking(64, 8), 2
TOGETHER = 30
"""Chunks that are embedded together: two calls a shard. The last bits of vectors depend on it."""


def write_corpus(path: Path, documents: int = DOCUMENTS, changed: int = 0) -> Path:
    """Every tenth document has several chunks, and the last record has the second one's text."""
    lines = harbour_corpus(path, documents, changed, every=10).read_text().splitlines()
    path.write_text("\n".join([*lines, lines[1].replace('"d1"', '"again"')]))
    return path


def target_in(folder: Path) -> Shards:
    return Shards(chroma_index([folder / "chroma"], "wiki", SHARDS))


def index(folder: Path, tiny: EmbedderSpec, **how: Any) -> IndexReport:
    return build(folder / "corpus.jsonl", target_in(folder), tiny, BuildOptions(chunking=CHUNKING, **how))


def contents(folder: Path) -> list[Any]:
    """Each shard's contents, by id."""
    return [collection_contents(*shard) for shard in target_in(folder).index.each()]


@pytest.fixture(scope="module", autouse=True)
def two_calls_a_shard():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.indexing.build, "TOGETHER", TOGETHER)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny):
    """Shards that were indexed in one undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder / "corpus.jsonl")
    index(folder, tiny)
    return folder


@pytest.fixture
def copied(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "copied"))


# --- results of a build ---


def test_the_index_is_that_of_one_collection(built, tiny, tmp_path):
    build_index(built / "corpus.jsonl", tmp_path / "one", "wiki", tiny, chunking=CHUNKING)
    one, many = chroma_index([tmp_path / "one"], "wiki"), target_in(built).index
    assert list(many.documents()) == list(one.documents())
    queries = Embedder(tiny).encode_queries(["harbour", "Passage 17", "Title 30"])
    with closing(one.open()) as whole, closing(many.open()) as shards:
        assert shards.info == whole.info
        assert shards.check_content()
        shards.check_embedder(Embedder(tiny))
        wanted, found = whole.query(queries, 5), shards.query(queries, 5)
    for expected, hits in zip(wanted, found, strict=True):
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in expected], abs=1e-6)
    assert sorted(path.name for path in built.iterdir()) == ["chroma", "corpus.jsonl"]
    names = ["shard-00-of-02", "shard-01-of-02"]
    assert sorted(path.name for path in (built / "chroma").iterdir()) == names


def test_a_repeated_build_changes_nothing(copied, tiny, encoded):
    report = index(copied, tiny)
    assert (report.built, encoded) == (False, [])
    assert report.survey.duplicates == 1


def test_an_update_embeds_what_is_new_and_leaves_each_document_in_its_shard(copied, built, tiny, encoded):
    write_corpus(copied / "corpus.jsonl", DOCUMENTS + 3)
    report = index(copied, tiny)
    assert report.changes is not None
    assert (report.changes.kept, report.changes.added, report.embedded) == (DOCUMENTS, 3, len(encoded))
    for (_, before), (_, after) in zip(contents(built), contents(copied), strict=True):
        assert before.items() <= after.items()


def test_another_corpus_is_refused_before_any_shard_is_written(copied, tiny):
    before = contents(copied)
    write_corpus(copied / "corpus.jsonl", changed=DOCUMENTS - 10)
    with pytest.raises(StoreError, match=r"exists already and is of other content, only 10 of its 60"):
        index(copied, tiny)
    assert contents(copied) == before


def test_what_the_whole_takes_is_judged_once(tmp_path, tiny):
    write_corpus(tmp_path / "corpus.jsonl")
    plans: list[Planned] = []

    def refuse(planned: Planned) -> None:
        plans.append(planned)
        raise StoreError("too large")

    with pytest.raises(StoreError, match="too large"):
        index(tmp_path, tiny, judge=refuse)
    ((planned,)) = plans
    assert planned.size.chunks == planned.chunks >= DOCUMENTS
    assert not list(tmp_path.rglob("*.sqlite3"))


def test_what_was_embedded_alone_is_written_by_the_next_build(built, tiny, encoded, tmp_path):
    write_corpus(tmp_path / "corpus.jsonl")
    first = index(tmp_path, tiny, embed_only=True)
    assert (first.is_written, first.embedded) == (False, len(encoded))
    assert not list(tmp_path.rglob("chroma.sqlite3"))
    plans: list[Planned] = []
    second = index(tmp_path, tiny, judge=plans.append)
    assert [planned.chunks for planned in plans] == [0]  # once, of the whole, with nothing left to embed
    assert (second.is_written, second.resumed) == (True, len(encoded))
    assert contents(tmp_path) == contents(built)
    assert index(tmp_path, tiny, embed_only=True).built is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "corpus.jsonl"]


def test_more_shards_than_the_documents_fill_are_refused(tmp_path, tiny):
    write_corpus(tmp_path / "corpus.jsonl", 2)
    target = Shards(chroma_index([tmp_path / "chroma"], "wiki", 40))
    with pytest.raises(StoreError, match=r"would be empty, as .* has 2 documents: set fewer"):
        build(tmp_path / "corpus.jsonl", target, tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


# --- killed, and run again ---


class Killed(BaseException):
    """Raised where a kill is to happen."""


class KilledWhileWriting(Unwritten):
    """The process that writes it is killed amid its files."""

    def write(self) -> None:
        self.work.joinpath("index").mkdir()
        self.work.joinpath("index", "chroma.sqlite3").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


class KillsItsParent(Unwritten):
    """The process that writes it kills the build, and waits to be killed."""

    def write(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Raise Killed at call number `call` of a method."""
    method, calls = getattr(owner, name), iter(range(1, 10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def end_in(where: str, shard: int, folder: Path, tiny: EmbedderSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a build end in a shard."""
    with monkeypatch.context() as patch:
        expected: type[BaseException] = Killed
        if where == "embedding":
            fail_at(patch, IndexJournal, "add_vectors", 2 * shard + 2)
        elif where == "between":
            fail_at(patch, Writers, "start", shard + 1)
        else:
            expected, start, calls = StoreError, Writers.start, iter(range(SHARDS))

            def killing(self: Writers, name: str, unwritten: Unwritten) -> None:
                start(
                    self, name, KilledWhileWriting(**vars(unwritten)) if next(calls) == shard else unwritten
                )

            patch.setattr(Writers, "start", killing)
        with pytest.raises(expected):
            index(folder, tiny)


@pytest.mark.parametrize(
    "shard", [pytest.param(0, marks=pytest.mark.slow("the first tier ends a build in the other shard")), 1]
)
@pytest.mark.parametrize("where", ["embedding", "inserting", "between"])
def test_a_build_that_ends_anywhere_and_is_repeated_gives_the_same_index(
    where, shard, tmp_path, built, tiny, encoded, monkeypatch
):
    write_corpus(tmp_path / "corpus.jsonl")
    end_in(where, shard, tmp_path, tiny, monkeypatch)
    before = len(encoded)
    report = index(tmp_path, tiny)
    assert contents(tmp_path) == contents(built)
    # Nothing that a journal has is embedded again.
    assert report.embedded == len(encoded) - before
    assert len(encoded) <= report.info.chunks + (TOGETHER if where == "embedding" else 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "corpus.jsonl"]


def run_and_die(folder: Path, tiny: EmbedderSpec) -> None:
    start, search.indexing.build.TOGETHER = Writers.start, TOGETHER

    def killing(self: Writers, name: str, unwritten: Unwritten) -> None:
        start(self, name, KillsItsParent(**vars(unwritten)))

    Writers.start = killing  # type: ignore[method-assign]  # of a process that ends here
    index(folder, tiny)


@pytest.mark.slow("a process that loads an embedder of its own")
def test_a_build_that_is_killed_takes_its_processes_with_it_and_is_repeated(tmp_path, built, tiny):
    write_corpus(tmp_path / "corpus.jsonl")
    killed(run_and_die, tmp_path, tiny)
    index(tmp_path, tiny)
    assert contents(tmp_path) == contents(built)
