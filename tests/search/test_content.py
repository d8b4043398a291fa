"""Hashes of a published collection find any damage, and use changes nothing."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chroma_parts import NAME, build, unit_vectors
from hypothesis import given
from hypothesis import strategies as st

from search.chroma.content import RECORD, check_content, record_content
from search.chroma.location import connect
from search.chroma.store import open_collection
from search.errors import StoreError
from search.stored_index import DATABASE_FILE

SMALL, LARGE = 500, 1100
"""Documents: few have their vectors in the database, many in files."""


def published(folder: Path, count: int) -> Path:
    build(folder, count=count)
    record_content(folder, NAME)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return published(tmp_path_factory.mktemp("large") / "chroma", LARGE)


@pytest.fixture
def folder(large, tmp_path):
    return Path(shutil.copytree(large, tmp_path / "chroma"))


def execute(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database, database:
        assert database.execute(statement).rowcount > 0


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_opening_searching_copying_and_other_collections_change_nothing(tmp_path, count):
    folder = published(tmp_path / "chroma", count)
    for _ in range(2):
        with open_collection(folder, NAME) as store:
            store.query(unit_vectors(1, 3), 3)
            assert check_content(folder, NAME)
    with connect(folder) as client:  # its rows push ours out of Chroma's queue
        other = client.create_collection("other", embedding_function=None)
        other.add(ids=[str(n) for n in range(2500)], embeddings=unit_vectors(2, 2500))
    assert check_content(Path(shutil.copytree(folder, tmp_path / "copy")), NAME)
    with connect(folder) as client:
        client.delete_collection("other")
    assert check_content(folder, NAME)


def test_each_collection_has_its_own_record(folder):
    with connect(folder) as client:
        client.create_collection("other", embedding_function=None).add(ids=["1"], embeddings=[[1.0, 0.0]])
    assert not check_content(folder, "other")
    record_content(folder, "other")
    assert check_content(folder, "other")
    with connect(folder) as client:
        client.get_collection("other", embedding_function=None).add(ids=["2"], embeddings=[[0.0, 1.0]])
    with pytest.raises(StoreError, match=r"'other' in .* is damaged"):
        check_content(folder, "other")
    assert check_content(folder, NAME)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE embedding_metadata SET string_value = 'swapped' WHERE key = 'chroma:document' AND id = 7",
        "UPDATE embedding_metadata SET string_value = 'swapped' WHERE key = 'title' AND id = 7",
        "UPDATE embeddings SET embedding_id = 'x' WHERE id = 7",
        "DELETE FROM embeddings WHERE id = 7",
        "UPDATE collection_metadata SET str_value = 'other: ' WHERE key = 'query_prefix'",
        "DELETE FROM segments WHERE scope = 'VECTOR'",
        "DELETE FROM collections",
    ],
)
def test_a_change_in_the_database_is_found(folder, statement):
    execute(folder, statement)
    with pytest.raises(StoreError, match=f"'{NAME}' in .* is damaged, .*Restore the folder"):
        check_content(folder, NAME)


def test_a_vector_that_is_still_in_the_database_is_hashed_there(tmp_path):
    folder = published(tmp_path / "chroma", SMALL)
    swap = "(SELECT vector FROM embeddings_queue WHERE id = '8')"
    execute(folder, f"UPDATE embeddings_queue SET vector = {swap} WHERE id = '7'")
    with pytest.raises(StoreError, match=f"not as published: texts in {DATABASE_FILE}"):
        check_content(folder, NAME)


def test_a_page_of_the_database_that_holds_nothing_readable_is_named(folder):
    database = folder / DATABASE_FILE
    content = bytearray(database.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    database.write_bytes(content)
    with pytest.raises(StoreError, match="it cannot be read"):
        check_content(folder, NAME)


VECTOR_FILES = ("header.bin", "data_level0.bin", "length.bin", "link_lists.bin", "index_metadata.pickle")


@given(st.data())
def test_a_changed_byte_in_any_vector_file_is_found(large, data):
    (path,) = large.glob(f"*/{data.draw(st.sampled_from(VECTOR_FILES))}")
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        with pytest.raises(StoreError, match=path.name):
            check_content(large, NAME)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [(Path.unlink, "header.bin"), (lambda header: header.with_name("more.bin").touch(), "more.bin")],
    ids=["missing", "extra"],
)
def test_a_missing_or_an_extra_vector_file_is_named(folder, change, named):
    change(next(folder.glob("*/header.bin")))
    with pytest.raises(StoreError, match=f"not as published: .*/{named}"):
        check_content(folder, NAME)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"wiki": 1}', b"[" * 100_000], ids=repr)
def test_a_damaged_record_is_refused_by_name(tmp_path, content):
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(StoreError, match=f"{RECORD} is damaged .*: restore or remove it"):
        check_content(tmp_path, NAME)
