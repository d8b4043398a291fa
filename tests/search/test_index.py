"""Index building with a real Chroma and the packaged embedder."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chroma_parts import collection_info
from hypothesis import given
from hypothesis import strategies as st
from index_builds import collection_contents, survey, write_jsonl

from drzero.ops.files import AlreadyWriting, recover, staging_folder
from search.chroma.content import RECORD, check_content, record_content
from search.chroma.location import connect
from search.chroma.store import DRAWS, draw_of, iter_documents, open_collection
from search.embedders import Embedder, EmbedderError, EmbedderSpec, model_identity
from search.errors import StoreError
from search.index import main
from search.indexing.build import IndexReport
from search.indexing.chunking import Chunking
from search.indexing.journal import IndexJournal
from search.indexing.shards import build_index
from search.sources.corpus import Corpus
from search.sources.document import CorpusError, Document
from search.stored_index import DATABASE_FILE

SPEC = EmbedderSpec("packaged-minilm", "cpu")
RECORDS = [
    {"id": "d2", "title": "Orrin", "text": "Orrin is a harbour town on the river Vell."},
    {"id": "d1", "title": "Mara Tesk", "text": "Mara Tesk painted The Blue Gate in Orrin."},
    {"id": "d3", "title": "", "text": "Nobody knows who built the salt bridge."},
]
EXPECTED = sorted((record["id"], record["title"], record["text"]) for record in RECORDS)


def rows(path: Path, collection: str = "wiki") -> list[tuple[str, str, str]]:
    return list(iter_documents(path, collection))


def build_in(folder: Path, records: Sequence[Any] = RECORDS, name: str = "wiki", **how: Any) -> IndexReport:
    """Write the records as the folder's corpus, and index them in its Chroma."""
    corpus = write_jsonl(folder / "corpus.jsonl", records)
    return build_index(corpus, folder / "chroma", name, SPEC, **how)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    build_in(folder)
    return folder


# --- results of a build ---


@pytest.mark.parametrize("page", [2, 1000])
def test_documents_are_returned_sorted_by_id(built, page, monkeypatch):
    monkeypatch.setattr("search.chroma.location._FOLDER_PAGE", page)
    assert rows(built / "chroma") == EXPECTED


def test_a_collection_records_how_it_was_built_and_has_unit_vectors_of_title_and_text(built):
    with open_collection(built / "chroma", "wiki") as store:
        info = store.info
        found: Any = store.collection.get(ids=["d1"], include=["embeddings"])["embeddings"]
    assert (info.embedder, info.dimension, info.distance, info.normalised) == (SPEC.name, 384, "cosine", True)
    assert (info.query_prefix, info.passage_prefix, info.documents) == ("", "", 3)
    assert info.revision.startswith("sha256:")
    expected = Embedder(SPEC).encode_passages(["Mara Tesk\nMara Tesk painted The Blue Gate in Orrin."])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_every_kind_of_source_gives_the_same_content_version(built, tmp_path):
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "corpus.parquet")
    sources = (tmp_path / "corpus.parquet", built / "corpus.jsonl", built / "chroma")
    assert len({survey(Corpus(source)).version for source in sources}) == 1


def test_foreign_chroma_folder_is_embedded_again(tmp_path):
    foreign = tmp_path / "foreign"
    with connect(foreign, create=True) as client:
        handle = client.create_collection("theirs", embedding_function=None)
        handle.add(
            ids=["x"],
            embeddings=np.array([[1.0, 0.0]], dtype=np.float32),
            documents=["A text."],
            metadatas=[{"title": "A title"}],
        )
    with pytest.raises(StoreError, match=r"'theirs' .* not built by search.index"):
        open_collection(foreign, "theirs")
    report = build_index(foreign, tmp_path / "chroma", "wiki", SPEC)
    assert rows(tmp_path / "chroma") == [("x", "A title", "A text.")]
    assert report.info.dimension == 384


def test_ids_made_from_content_do_not_depend_on_the_line(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}, {"text": "one"}])
    ids = [{document.id for _, document in Corpus(path).read()} for path in (first, second)]
    assert ids[0] == ids[1]
    other = write_jsonl(tmp_path / "c.jsonl", [{"text": "two"}, {"text": "One"}])
    versions = [survey(Corpus(path)).version for path in (first, second, other)]
    assert versions[0] == versions[1] != versions[2]


def test_texts_that_the_embedder_cannot_read_are_refused_before_they_are_embedded(tmp_path):
    source = tmp_path / "am.jsonl"
    source.write_text('{"id": "1", "text": "የሥነ ፈለክ ምርምር ተቋሙ በ1904 ተመሠረተ።"}')
    with pytest.raises(EmbedderError, match=r"does not know 100% of the letters .* \(docs/languages\.md\)"):
        build_index(source, tmp_path / "chroma", "wiki", SPEC)
    assert list(tmp_path.iterdir()) == [source]


def test_prefixes_are_told_and_kept_and_others_need_replace(tmp_path):
    source = tmp_path / "one.jsonl"
    source.write_text('{"id": "1", "text": "Orrin is a town on the river Vell."}')
    own = replace(SPEC, query_prefix="ask: ", passage_prefix="text: ")
    report = build_index(source, tmp_path / "chroma", "wiki", own)
    assert "(384 dimensions, prefixes 'ask: ' and 'text: ')" in str(report)
    with pytest.raises(StoreError, match="another embedder or chunk size"):
        build_index(source, tmp_path / "chroma", "wiki", SPEC)
    assert "left unchanged" in str(build_index(source, tmp_path / "chroma", "wiki", own))
    again = build_index(source, tmp_path / "chroma", "wiki", SPEC, replace=True)
    assert "(384 dimensions, no prefixes)" in str(again)


def test_a_long_document_becomes_chunks_that_name_their_document(tmp_path):
    records = [*RECORDS, {"id": "long", "title": "Salt", "text": "salt " * 400}]
    report = build_in(tmp_path, records, chunking=Chunking(256, 0))
    assert (report.info.documents, report.info.chunks, report.info.chunk_tokens) == (4, 5, 256)
    with open_collection(tmp_path / "chroma", "wiki") as store:
        found = store.collection.get(where={"doc_id": "long"})
    assert "".join(found["documents"]) == "salt " * 400
    digest = Document("long", "Salt", "salt " * 400).digest().hex()
    expected = {"title": "Salt", "doc_id": "long", "doc_digest": digest}
    assert found["metadatas"] == [
        {**expected, "chunk": f"{part}/2", "draw": draw_of(key)}
        for part, key in enumerate(found["ids"], start=1)
    ]
    assert [key.rpartition("-")[0] for key in found["ids"]] == ["long#1", "long#2"]


# --- existing collections ---


def test_a_repeated_build_leaves_the_folder_unchanged_and_loads_no_model(built, monkeypatch):
    before = (built / "chroma").stat().st_ino
    monkeypatch.setattr(Embedder, "load", lambda _: pytest.fail("the model was loaded"))
    monkeypatch.setattr(Embedder, "_model", property(lambda _: pytest.fail("the model was loaded")))
    assert not build_in(built).built and (built / "chroma").stat().st_ino == before


def test_another_corpus_under_the_same_name_needs_replace(tmp_path):
    build_in(tmp_path)
    with pytest.raises(StoreError, match=r"only 1 of its 3 documents are the same in .*--replace"):
        build_in(tmp_path, RECORDS[:1])
    assert rows(tmp_path / "chroma") == EXPECTED
    build_in(tmp_path, RECORDS[:1], replace=True)
    assert [row[0] for row in rows(tmp_path / "chroma")] == ["d2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "corpus.jsonl"]


def test_an_update_embeds_what_is_new_or_changed_and_gives_what_a_build_from_scratch_gives(tmp_path):
    updated, at_once = tmp_path / "updated", tmp_path / "at-once"
    long = {"id": "long", "text": "salt " * 400}
    build_index(write_jsonl(tmp_path / "a.jsonl", [*RECORDS, long]), updated, "wiki", SPEC)
    changed, new = {"id": "d3", "text": "harbour " * 300}, {"id": "d4", "text": "Vell is a river."}
    source = write_jsonl(tmp_path / "b.jsonl", [new, *RECORDS[:2], changed])
    report = build_index(source, updated, "wiki", SPEC)
    done = report.changes
    assert (done.added, done.changed, done.removed, done.kept, report.embedded) == (1, 1, 1, 2, 3)
    assert build_index(source, at_once, "wiki", SPEC).info == report.info
    ours, theirs = (sorted(collection_contents(place)[1].items()) for place in (updated, at_once))
    assert [(key, row[:2]) for key, row in ours] == [(key, row[:2]) for key, row in theirs]
    vectors = [[np.frombuffer(row[2], "<f4") for _, row in each] for each in (ours, theirs)]
    np.testing.assert_allclose(*vectors, atol=1e-5)


def test_an_update_of_an_index_without_draws_adds_none(tmp_path):
    more = [*RECORDS, {"id": "d4", "text": "Vell is a river."}]
    assert build_in(tmp_path).info.draws == build_in(tmp_path, more).info.draws == DRAWS
    with connect(tmp_path / "chroma") as client:
        handle = client.get_collection("wiki", embedding_function=None)
        handle.modify(metadata={key: value for key, value in handle.metadata.items() if key != "draws"})
    record_content(tmp_path / "chroma", "wiki")
    assert build_in(tmp_path, more, replace=True).info.draws == build_in(tmp_path).info.draws == 0


def test_other_collections_of_the_folder_are_kept(tmp_path):
    chroma = tmp_path / "chroma"
    build_in(tmp_path)
    build_in(tmp_path, RECORDS[:1], "notes")
    build_in(tmp_path, RECORDS, "notes", replace=True)
    assert rows(chroma) == rows(chroma, "notes") == EXPECTED
    with open_collection(chroma, "wiki") as store:
        found = store.query(Embedder(SPEC).encode_queries(["who painted The Blue Gate?"]), 1)
    assert found[0][0]["document"]["title"] == "Mara Tesk"


def test_folder_that_is_not_chroma_is_left_alone(tmp_path):
    thesis = tmp_path / "chroma" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    with pytest.raises(StoreError, match="not a Chroma folder"):
        build_in(tmp_path, replace=True)
    assert thesis.read_text() == "precious"


# --- bad corpora ---


def test_parquet_row_without_text_is_named(tmp_path):
    pq.write_table(pa.table({"text": ["a"] * 1500 + [None]}), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="row 1501: no text"):
        survey(Corpus(tmp_path / "c.parquet"))


def test_chroma_source_with_several_collections_asks_which(tmp_path):
    with connect(tmp_path / "db", create=True) as client:
        for name in ("one", "two"):
            client.create_collection(f"the-{name}", embedding_function=None)
    with pytest.raises(CorpusError, match=r"2 collections \(the-one, the-two\): name one "):
        survey(Corpus(tmp_path / "db"))


def test_unknown_kind_of_source_is_refused(tmp_path):
    (tmp_path / "corpus.pdf").write_text("text\nx\n")
    with pytest.raises(CorpusError, match=r"a corpus is a file, a folder or a glob of \.jsonl, "):
        survey(Corpus(tmp_path / "corpus.pdf"))


def test_command_line_prints_one_error_line_and_exits_2(tmp_path, capsys):
    words = f"--source {tmp_path}/none.jsonl --chroma-path {tmp_path}/db --collection wiki"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: no corpus at {tmp_path}/none.jsonl\n"


# --- damage ---


@pytest.mark.parametrize("records", [RECORDS, RECORDS[:-1]], ids=["unchanged", "an update"])
def test_a_damaged_collection_is_not_kept_but_can_be_replaced(tmp_path, records):
    chroma = tmp_path / "chroma"
    build_in(tmp_path)
    with closing(sqlite3.connect(chroma / DATABASE_FILE)) as database, database:
        database.execute("UPDATE embedding_metadata SET string_value = 'x' WHERE key = 'chroma:document'")
    with pytest.raises(StoreError, match="is damaged"):
        build_in(tmp_path, records)
    assert build_in(tmp_path, records, replace=True).embedded == len(records)
    assert check_content(chroma, "wiki")
    assert "x" not in {text for _, _, text in rows(chroma)}


def test_a_collection_without_a_record_gets_one_at_the_next_build(tmp_path):
    build_in(tmp_path)
    (tmp_path / "chroma" / RECORD).unlink()
    assert not build_in(tmp_path).built
    assert check_content(tmp_path / "chroma", "wiki")


# --- nothing half-written ---


def test_embedder_out_of_reach_is_one_clear_error_and_leaves_nothing(tmp_path):
    source = write_jsonl(tmp_path / "c.jsonl", RECORDS)
    with pytest.raises(EmbedderError, match=r"'/no/such-model' could not be loaded.*use 'packaged-minilm'"):
        build_index(source, tmp_path / "chroma", "wiki", EmbedderSpec("/no/such-model", "cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_failure_while_writing_leaves_the_old_collection_and_nothing_else(tmp_path, monkeypatch):
    build_in(tmp_path)

    def fail(*_: object) -> np.ndarray:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Embedder, "encode_passages", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        build_in(tmp_path, RECORDS[:1], replace=True)
    assert rows(tmp_path / "chroma") == EXPECTED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "corpus.jsonl"]


def test_full_disk_is_one_clear_error_and_keeps_the_existing_collection(tmp_path, monkeypatch):
    build_in(tmp_path)
    prepare = IndexJournal.__init__

    def prepare_small(self: IndexJournal, path: Path, read_only: bool = False) -> None:
        prepare(self, path, read_only)
        self._db.execute("PRAGMA max_page_count = 40")

    monkeypatch.setattr(IndexJournal, "__init__", prepare_small)
    many = [*RECORDS, *({"id": f"x{n}", "text": f"salt {n} " * 100} for n in range(300))]
    with pytest.raises(StoreError, match="the disk is full"):
        build_in(tmp_path, many)
    assert rows(tmp_path / "chroma") == EXPECTED


@pytest.mark.parametrize("empty_made_since", [False, True])
def test_folder_moved_aside_by_a_killed_publish_is_put_back(tmp_path, empty_made_since):
    (tmp_path / ".db.previous").mkdir()
    (tmp_path / ".db.previous" / "file").write_text("old")
    if empty_made_since:
        (tmp_path / "db").mkdir()
    recover(tmp_path / "db")
    assert (tmp_path / "db" / "file").read_text() == "old"


def test_a_linked_folder_is_built_and_updated_in_the_link_s_target(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "chroma"
    link.symlink_to(tmp_path / "disk" / "real")
    build_in(tmp_path, RECORDS[:2])
    build_in(tmp_path)
    assert link.is_symlink() and rows(link) == rows(tmp_path / "disk" / "real") == EXPECTED
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_a_linked_folder_that_another_build_is_writing_is_refused(tmp_path):
    (tmp_path / "chroma").symlink_to(tmp_path / "real")
    with (
        staging_folder(tmp_path / "real"),
        pytest.raises(AlreadyWriting, match=r"another build is writing .*/real: wait"),
    ):
        build_in(tmp_path)


# --- opening ---


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("embedder", "intfloat/e5-large-v2", "its model is 'intfloat/e5-large-v2', not 'packaged-minilm'"),
        ("query_prefix", "query: ", "its query prefix is 'query: ', not ''"),
        ("passage_prefix", "passage: ", "its passage prefix is 'passage: ', not ''"),
        ("dimension", 1024, "its dimension is 1024, not 384"),
        ("distance", "hamming", "its distance is 'hamming', not 'cosine'"),
        ("normalised", False, "normalised vectors: False, not True"),
    ],
)
def test_collection_of_another_embedder_is_refused(tmp_path, field, value, message):
    with connect(tmp_path, create=True) as client:
        info = replace(collection_info("v", 1), embedder=SPEC.name, dimension=384).to_metadata()
        client.create_collection("wiki", metadata={**info, field: value}, embedding_function=None)
    with open_collection(tmp_path, "wiki") as store, pytest.raises(StoreError, match=message):
        store.check_embedder(Embedder(SPEC))


def test_other_weights_under_the_same_name_are_refused(built, monkeypatch):
    embedder = Embedder(SPEC)
    with open_collection(built / "chroma", "wiki") as store:
        store.check_embedder(embedder)
        monkeypatch.setattr(embedder, "encode_passages", lambda texts: np.eye(384, dtype=np.float32)[:1])
        with pytest.raises(StoreError, match="the same text gets another vector"):
            store.check_embedder(embedder)


# --- embedders ---


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9.]{0,20}", fullmatch=True))
def test_model_has_one_name_wherever_it_is_stored(name):
    places = [f"org/{name}", f"/models/{name}", f"/hub/models--org--{name}/snapshots/0123", f"models/{name}/"]
    assert {model_identity(place) for place in places} == {name.lower()}


def test_chroma_telemetry_is_off(built):
    with connect(built / "chroma") as client:
        assert not client.get_settings().anonymized_telemetry
