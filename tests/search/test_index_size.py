"""The estimated size of an index grows with its content, and matches a real index."""

from pathlib import Path

import pytest
from chroma_parts import unit_vectors, written_index, written_target
from hypothesis import given
from hypothesis import strategies as st

from search.indexing.faiss_folder import FaissFolder
from search.indexing.size import FACTOR, KINDS, FaissSize, IndexSize, Planned, ShardedSize

CHUNKS = 2000
SIZES = ("serving_bytes", "building_bytes", "disk_bytes", "journal_bytes", "disk_while_building")
INDICES = st.builds(
    IndexSize, chunks=st.integers(1, 10**9), dimension=st.integers(1, 8192), text_bytes=st.integers(0, 10**13)
)


@pytest.mark.parametrize("kind", [None, *KINDS])
@given(INDICES, st.integers(0, 10**9), st.integers(0, 8192), st.integers(0, 10**13))
def test_more_of_anything_takes_no_less(kind, size, chunks, dimension, text):
    wider = 0 if kind else dimension  # a code's bytes divide the dimension
    less, more = (
        (FaissSize(*content, kind) if kind else IndexSize(*content))
        for content in (
            (size.chunks, size.dimension, size.text_bytes),
            (size.chunks + chunks, size.dimension + wider, size.text_bytes + text),
        )
    )
    assert all(getattr(more, name) >= getattr(less, name) for name in SIZES)
    assert all(later >= before for later, before in zip(more.graph_seconds, less.graph_seconds, strict=True))


@given(INDICES, st.integers(2, 1000))
def test_sizes_are_in_proportion_and_the_graph_takes_longer_than_that(size, times):
    large = IndexSize(times * size.chunks, size.dimension, times * size.text_bytes)
    for name in SIZES:
        assert getattr(large, name) == pytest.approx(times * getattr(size, name), rel=1e-6, abs=times)
    assert large.graph_seconds[0] >= times * size.graph_seconds[0]


@given(INDICES)
def test_an_index_is_larger_than_its_vectors_and_texts(size):
    assert min(size.serving_bytes, size.disk_bytes) > size.vector_bytes
    assert size.disk_bytes > size.text_bytes and size.journal_bytes > size.text_bytes
    assert 0 < size.graph_seconds[0] <= size.graph_seconds[1]


@given(INDICES, st.integers(0, 10**13), st.floats(1e9, 1e15))
def test_a_machine_twice_as_fast_embeds_in_half_the_time(size, text, speed):
    planned = Planned(size, size.chunks, text, 10**8, 0)
    assert planned.embedding_seconds(2 * speed) == pytest.approx(planned.embedding_seconds(speed) / 2)


def texts() -> list[str]:
    """Texts of this project's docs, of 400 characters."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    words = " ".join(" ".join(page.read_text() for page in pages).split())
    step = (len(words) - 400) // CHUNKS
    return [words[start : start + 400] for start in range(0, step * CHUNKS, step)]


def test_a_real_index_and_its_journal_are_as_large_as_is_said(tmp_path):
    some = texts()
    journal = written_index(tmp_path / "chroma", some, unit_vectors(0, CHUNKS, dimension=64))
    said = IndexSize(CHUNKS, 64, sum(len(text.encode()) for text in some))
    files = (path.stat().st_size for path in (tmp_path / "chroma").rglob("*") if path.is_file())
    for found, expected in ((sum(files), said.disk_bytes), (journal.stat().st_size, said.journal_bytes)):
        assert expected / FACTOR < found < expected * FACTOR


def test_wikipedia_as_codes_takes_a_tenth_of_its_vectors():
    sizes = {kind: FaissSize(21_000_000, 768, 650 * 21_000_000, kind).serving_bytes for kind in KINDS}
    assert sizes["flat"] < sizes["hnsw"] and sizes["ivfpq"] < sizes["flat"] / 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_index_of_faiss_is_as_large_as_is_said(tmp_path, kind):
    some = texts()
    written_target(FaissFolder(tmp_path / "faiss", kind), some, unit_vectors(0, CHUNKS, dimension=64))
    said = FaissSize(CHUNKS, 64, sum(len(text.encode()) for text in some), kind)
    files = {path.name: path.stat().st_size for path in (tmp_path / "faiss").iterdir()}
    assert said.serving_bytes / 1.1 < files["index.faiss"] < said.serving_bytes * 1.1
    assert said.disk_bytes / FACTOR < sum(files.values()) < said.disk_bytes * FACTOR


@given(INDICES, st.integers(1, 99), st.integers(1, 99))
def test_shards_are_served_as_one_index_is_and_take_the_memory_of_those_inserted_at_once(
    size, shards, writers
):
    sharded = ShardedSize(size.chunks, size.dimension, size.text_bytes, shards, writers)
    assert (sharded.serving_bytes, sharded.disk_bytes) == (size.serving_bytes, size.disk_bytes)
    each = size.building_bytes / shards
    assert sharded.building_bytes == pytest.approx(each * min(shards, writers), abs=1)
    assert sharded.graph_seconds[0] <= sharded.graph_seconds[1]
