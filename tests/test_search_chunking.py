"""Splitting documents: what holds for any text, with the packaged embedder's own tokenizer."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from search.embedders import Embedder, EmbedderSpec, Prefixes
from search.indexing.chunking import Chunk, Chunker, Chunking, ChunkingError
from search.indexing.corpus import Document
from search.store import passage_text

WORDS = ("Orrin", "is", "a", "harbour", "town", "on", "the", "river", "Vell", "uncharacteristically", "x")
sentences = st.lists(st.sampled_from(WORDS), min_size=1, max_size=20).map(" ".join)
prose = st.lists(st.tuples(sentences, st.sampled_from([". ", "! ", "\n", "\n\n", " "])), max_size=25).map(
    lambda pairs: "".join(sentence + end for sentence, end in pairs)
)
texts = st.one_of(prose, st.text(max_size=400), st.text(" \nab.é東京。😀", max_size=600))
titles = st.one_of(st.just(""), sentences, st.text(max_size=60))


@cache
def embedder() -> Embedder:
    return Embedder(EmbedderSpec("packaged-minilm", "cpu"))


@cache
def chunker(tokens: int = 40, overlap: int = 8) -> Chunker:
    return Chunker(embedder(), Chunking(tokens, overlap))


def split(text: str, title: str = "", tokens: int = 40, overlap: int = 8) -> list[Chunk]:
    return chunker(tokens, overlap).split(Document("doc", title, text))


@cache
def tokenizer() -> Tokenizer:
    return embedder().plain_tokenizer()


def count(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False).ids)


def read_tokens(title: str, text: str) -> int:
    """Tokens of a chunk as the embedder reads it: prefix, title and special tokens included."""
    prefix = embedder().prefixes.passage
    return len(tokenizer().encode(prefix + passage_text(title, text)).ids)


@given(texts, titles)
def test_progress_comes_with_every_chunk_and_is_one_document_in_sum(text: str, title: str) -> None:
    parts: list[float] = []
    chunks = chunker().split(Document("doc", title, text), parts.append)
    assert len(parts) == len(chunks) and sum(parts) == pytest.approx(1)


def test_a_long_title_without_a_text_is_one_chunk() -> None:
    parts: list[float] = []
    (chunk,) = chunker().split(Document("doc", "Orrin is a harbour town " * 10, ""), parts.append)
    assert (chunk.title, chunk.text, parts) == ("Orrin is a harbour town Orrin is a", "", [1])


@given(texts, titles)
def test_no_chunk_is_longer_than_the_limit_as_the_embedder_reads_it(text: str, title: str) -> None:
    chunks = split(text, title)
    assert all(read_tokens(chunk.title, chunk.text) <= 40 for chunk in chunks)


@given(texts, titles)
def test_chunks_are_slices_in_order_that_join_to_the_text_without_their_overlap(
    text: str, title: str
) -> None:
    end, joined = 0, ""
    for chunk in split(text, title):
        assert text[chunk.start :].startswith(chunk.text) and chunk.start <= end
        joined += chunk.text[end - chunk.start :]
        assert (chunk.start + len(chunk.text) > end) or not text
        end = chunk.start + len(chunk.text)
    assert joined == text


@given(texts)
def test_without_overlap_the_chunks_joined_are_the_text(text: str) -> None:
    assert "".join(chunk.text for chunk in split(text, overlap=0)) == text


@given(prose)
def test_chunks_repeat_whole_words_up_to_the_overlap(text: str) -> None:
    chunks = split(text)
    for before, after in pairwise(chunks):
        repeated = text[after.start : before.start + len(before.text)]
        assert 0 < count(repeated) <= 8
        assert text[after.start - 1].isspace()


@given(texts, titles)
def test_a_document_that_fits_is_one_chunk_that_keeps_id_title_and_text(text: str, title: str) -> None:
    if read_tokens(title, text) <= 40:
        assert split(text, title) == [Chunk("doc", title, text, 1, 1, 0)]


@given(texts, titles)
def test_splitting_again_gives_the_same_ids_and_parts_in_order(text: str, title: str) -> None:
    chunks = split(text, title)
    assert chunks == split(text, title)
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    assert [(chunk.part, chunk.parts) for chunk in chunks] == [
        (place, len(chunks)) for place in range(1, len(chunks) + 1)
    ]


def test_a_chunk_id_changes_with_its_text_and_not_with_what_follows() -> None:
    text = "Orrin is a town. " * 20
    ids, changed = ([chunk.id for chunk in split(t)] for t in (text, text + "It has a harbour."))
    assert ids[0] == changed[0] and ids[-1] != changed[-1]


def test_chunks_end_after_sentences_where_possible() -> None:
    chunks = split("The harbour of Orrin is old. Nobody knows its age. " * 12)
    assert len(chunks) > 3
    assert all(chunk.text.rstrip().endswith(".") for chunk in chunks)


def test_the_title_is_repeated_on_each_chunk() -> None:
    chunks = split("Orrin is a town. " * 40, "The town of Orrin")
    assert len(chunks) > 1 and {chunk.title for chunk in chunks} == {"The town of Orrin"}


def test_a_title_that_would_leave_no_room_is_cut_to_a_quarter() -> None:
    chunks = split("Orrin is a town. " * 40, "A very long title " * 30)
    assert all(chunk.title and count(chunk.title) <= 10 for chunk in chunks)


def test_the_passage_prefix_counts() -> None:
    prefixed = Embedder(EmbedderSpec("packaged-minilm", "cpu"))
    prefixed.prefixes = Prefixes("query: ", "passage: ")
    splitter = Chunker(prefixed, Chunking(40, 0))
    chunks = splitter.split(Document("doc", "", "harbour " * 200))
    assert all(count(f"passage: {chunk.text}") <= 38 for chunk in chunks)
    assert max(count(chunk.text) for chunk in chunks) == 36


def test_chunks_are_never_longer_than_the_embedder_reads() -> None:
    splitter = Chunker(embedder(), Chunking(4000, 32))
    chunks = splitter.split(Document("doc", "", "harbour " * 600))
    assert max(count(chunk.text) for chunk in chunks) + 2 == embedder().max_tokens


def test_splitting_takes_time_in_proportion_to_the_text() -> None:
    seen = 0

    class Counting:
        """The tokenizer, and the characters it was given."""

        def encode(self, text: str, **options: bool) -> object:
            nonlocal seen
            seen += len(text)
            return real.encode(text, **options)

    splitter = Chunker(embedder(), Chunking(40, 8))
    real, splitter._tokenizer = splitter._tokenizer, Counting()
    text = "Orrin is a town. " * 5000
    splitter.split(Document("doc", "", text))
    assert seen < 8 * len(text)


@pytest.mark.parametrize(("tokens", "overlap"), [(31, 0), (64, 17), (64, -1)])
def test_sizes_that_do_not_fit_together_are_refused(tokens: int, overlap: int) -> None:
    with pytest.raises(ChunkingError, match=f"chunks of {tokens} tokens with {overlap} repeated"):
        Chunking(tokens, overlap)


def test_an_overlap_too_large_for_what_the_embedder_reads_is_refused() -> None:
    with pytest.raises(ChunkingError, match="packaged-minilm reads 256 tokens"):
        Chunker(embedder(), Chunking(512, 128))
