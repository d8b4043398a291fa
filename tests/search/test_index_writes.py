"""How often Chroma writes its vector files. In the end they hold everything, for any threshold."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from chroma_parts import NAME, build, chroma_server, text_of, unit_vectors, written_index
from conftest import unused_port
from hypothesis import given
from hypothesis import strategies as st

from search.chroma.content import check_content, record_content
from search.chroma.location import connect
from search.chroma.store import SYNC_THRESHOLD, SYNCS, open_collection, sync_threshold
from search.indexing import collection as writing
from search.stored_index import DATABASE_FILE

COUNT = 1300
WAITING = """
SELECT count(*) FROM embeddings_queue WHERE seq_id > coalesce((SELECT max(seq_id) FROM max_seq_id m
JOIN segments s ON s.id = m.segment_id WHERE s.scope = 'VECTOR'), 0)
"""


def waiting(folder: Path) -> int:
    """Vectors that are in Chroma's queue, and in no vector file."""
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database:
        return int(database.execute(WAITING).fetchone()[0])


def threshold_of(place: Path | str) -> int:
    with connect(place) as client:
        configuration: Any = client.get_collection(NAME, embedding_function=None).configuration
    return int(configuration["hnsw"]["sync_threshold"])


def finds_all(place: Path | str, count: int) -> bool:
    with open_collection(place, NAME) as store:
        found = store.query(unit_vectors(0, count)[:50], 1)
    return [hits[0]["document"]["text"] for hits in found] == [text_of(number) for number in range(50)]


@given(st.integers(0, 10**9))
def test_vector_files_are_written_a_few_times_however_many_vectors_there_are(vectors):
    assert sync_threshold(vectors) >= SYNC_THRESHOLD
    assert vectors // sync_threshold(vectors) <= SYNCS


def test_a_finished_index_has_all_vectors_in_its_files_and_chromas_own_threshold(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "sync_threshold", lambda vectors: 10 * vectors)
    folder = tmp_path / "chroma"
    written_index(folder, [text_of(number) for number in range(COUNT)], unit_vectors(0, COUNT))
    assert waiting(folder) == 0 and threshold_of(folder) == SYNC_THRESHOLD
    assert check_content(folder, NAME) and finds_all(folder, COUNT) and check_content(folder, NAME)


def test_an_index_whose_vectors_wait_in_the_queue_is_served_as_it_was_recorded(tmp_path):
    folder = tmp_path / "chroma"
    build(folder, count=COUNT, threshold=10 * COUNT)
    record_content(folder, NAME)
    assert waiting(folder) == COUNT
    assert finds_all(folder, COUNT) and check_content(folder, NAME) and waiting(folder) == COUNT


def test_a_server_writes_what_waits_when_it_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "sync_threshold", lambda vectors: 10 * vectors)
    with chroma_server(tmp_path / "server", unused_port()) as server:
        written_index(server.url, [text_of(number) for number in range(COUNT)], unit_vectors(0, COUNT))
        assert finds_all(server.url, COUNT) and waiting(server.folder) == COUNT
        server.stop()
        server.start()
        assert finds_all(server.url, COUNT) and waiting(server.folder) == 0
