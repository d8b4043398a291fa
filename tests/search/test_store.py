"""A store whose folder is moved, changed or damaged: right answers or StoreUnavailable, and recovery."""

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from chroma_parts import NAME, build, collection_info, text_of
from hypothesis import given
from hypothesis import strategies as st

from search.chroma import content
from search.chroma.content import check_files
from search.chroma.location import ChromaPlace, connect
from search.chroma.store import Store, open_collection
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.stored_index import DATABASE_FILE


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "chroma"
    return folder, build(folder)


@pytest.fixture
def folder(template, tmp_path):
    return Path(shutil.copytree(template[0], tmp_path / "chroma"))


@pytest.fixture
def vectors(template):
    return template[1]


@pytest.fixture
def store(folder):
    with open_collection(folder, NAME) as opened:
        yield opened


def answers_right(store: Store, vectors: np.ndarray) -> bool:
    """Whether each document is its own nearest."""
    asked = range(0, len(vectors), 100)
    found = store.query(vectors[list(asked)], 3)
    assert all(len(hits) == 3 for hits in found)
    return [hits[0]["document"]["text"] for hits in found] == [text_of(number) for number in asked]


def unavailable(store: Store, vectors: np.ndarray) -> str:
    """The store's error, the same three times."""
    for _ in range(3):
        with pytest.raises(StoreUnavailable) as caught:
            store.query(vectors[:2], 3)
    return str(caught.value)


@pytest.mark.parametrize("asked_before", [True, False])
def test_missing_folder_is_unavailable_until_it_is_back(store, folder, vectors, asked_before):
    if asked_before:
        assert answers_right(store, vectors)
    folder.rename(folder.with_name("elsewhere"))
    assert f"no Chroma folder at {folder}" in unavailable(store, vectors)
    assert not folder.exists()  # nothing new was begun in its place
    folder.with_name("elsewhere").rename(folder)
    assert answers_right(store, vectors)


def test_folder_replaced_by_another_version_is_refused_until_the_old_one_is_back(store, folder, vectors):
    assert answers_right(store, vectors)
    build(folder.with_name("new"), seed=1)
    folder.rename(folder.with_name("old"))
    folder.with_name("new").rename(folder)
    assert "another version now (version-1, and version-0 is served)" in unavailable(store, vectors)
    shutil.rmtree(folder)
    folder.with_name("old").rename(folder)
    assert answers_right(store, vectors)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_database_is_unavailable_until_it_is_restored(store, folder, vectors, share):
    assert answers_right(store, vectors)
    database = folder / DATABASE_FILE
    whole = database.read_bytes()
    cut = whole[: int(share * len(whole))]
    database.write_bytes(cut)
    assert "is damaged" in unavailable(store, vectors)
    assert database.read_bytes() == cut  # nobody wrote into the damaged file
    database.write_bytes(whole)
    assert answers_right(store, vectors)


def test_vector_files_that_break_under_a_store_do_no_harm(store, folder, vectors):
    assert answers_right(store, vectors)
    for path in folder.glob("*/*.*"):
        os.truncate(path, path.stat().st_size // 2)
    assert answers_right(store, vectors)


@pytest.mark.parametrize(
    "name", ["data_level0.bin", "length.bin", "header.bin", "link_lists.bin", "index_metadata.pickle"]
)
def test_missing_vector_file_is_named_instead_of_being_opened(folder, name):
    next(folder.glob(f"*/{name}")).unlink()
    with pytest.raises(StoreError, match=f"is damaged: .* lacks {name}"):
        open_collection(folder, NAME)


def test_another_chromadb_is_refused_by_name(folder, monkeypatch):
    monkeypatch.setattr(content, "version", lambda _: "1.6.0")
    refused = r"chromadb 1\.6\.0 is installed, and search/chroma/content\.py reads the private files of 1\.5"
    with pytest.raises(StoreError, match=refused):
        open_collection(folder, NAME)


def test_vector_files_of_another_format_are_refused_by_name(folder):
    header = next(folder.glob("*/header.bin"))
    header.write_bytes(struct.pack("<i", 2) + header.read_bytes()[4:])
    with pytest.raises(StoreError, match=r"header\.bin is in format 2, and chromadb 1\.5 writes format 1"):
        check_files(folder)


@given(st.sampled_from(["data_level0.bin", "length.bin", "header.bin", DATABASE_FILE]), st.floats(0, 0.9999))
def test_file_cut_off_anywhere_is_detected(template, name, share):
    path = next(template[0].rglob(name))
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(StoreNotReady, match=name):
            check_files(template[0])
    finally:
        path.write_bytes(whole)
    check_files(template[0])


def test_touched_database_does_not_make_the_store_read_everything_again(store, folder, vectors):
    assert answers_right(store, vectors)
    handle = store.collection
    os.utime(folder / DATABASE_FILE)
    assert answers_right(store, vectors) and store.collection is handle


def test_collection_changed_in_place_is_refused(store, folder, vectors):
    assert answers_right(store, vectors)
    with connect(folder) as client:
        info = collection_info("version-2", 1100)
        client.get_collection(NAME, embedding_function=None).modify(metadata=info.to_metadata())
    assert "another version now (version-2" in unavailable(store, vectors)


def test_collection_that_lost_documents_is_unavailable(store, folder, vectors):
    assert answers_right(store, vectors)
    with connect(folder) as client:
        handle = client.get_collection(NAME, embedding_function=None)
        handle.delete(ids=[str(number) for number in range(1, 1100)])
    assert "it returned 1 of 3 passages" in unavailable(store, vectors)


DEFAULT = ("default_tenant", "default_database")


@pytest.mark.parametrize(
    ("text", "url", "database"),
    [
        ("http://localhost:9000", "http://localhost:9000", DEFAULT),
        ("http://10.0.0.7/", "http://10.0.0.7:8000", DEFAULT),
        ("http://[::1]:9000", "http://[::1]:9000", DEFAULT),
        ("https://api.trychroma.com/ab-12/wiki", "https://api.trychroma.com:443", ("ab-12", "wiki")),
    ],
)
def test_address_of_a_server_is_read(text, url, database):
    place = ChromaPlace.parse(text)
    assert (place.url, (place.tenant, place.database), str(place)) == (url, database, text)
    assert place.folder is None and ChromaPlace.parse(place) is place


FORM, KEY = r"address is http\(s\)://HOST\[:PORT\]", "put a key into CHROMA_API_KEY"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, FORM) for text in ("ftp://host:1", "http://", "http://host:port", "http://host:99999")),
        *((text, FORM) for text in ("http://host/tenant", "http://host/a/b/c")),
        *(
            (text, KEY)
            for text in ("https://secret@host", "https://u:secret@host/a/b", "https://h?key=secret")
        ),
    ],
)
def test_invalid_address_is_refused_with_the_expected_form_and_without_a_key(text, said):
    with pytest.raises(StoreError, match=said) as caught:
        ChromaPlace.parse(text)
    assert "secret" not in str(caught.value)


@given(st.text("ab/.: ~é", min_size=1).filter(lambda text: "://" not in text))
def test_text_without_a_scheme_is_a_folder(text):
    place = ChromaPlace.parse(text)
    assert (place.folder, str(place)) == (Path(text), text)
