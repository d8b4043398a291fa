"""Splitting documents: what holds for any text, with the packaged embedder's own tokenizer."""

import re
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tokenizers import Tokenizer

from search.embedders import Embedder, EmbedderSpec, Prefixes
from search.indexing.boundaries import SENTENCE_END
from search.indexing.chunking import Chunk, Chunker, Chunking, ChunkingError
from search.sources.document import Document
from search.stored_index import passage_text

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


def check(document: Document) -> None:
    """Chunks are slices in order that join to the text without their overlap, and none is too long."""
    chunks = chunker().split(document)
    assert chunks == chunker().split(document)
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    places = [(place, len(chunks)) for place in range(1, len(chunks) + 1)]
    assert [(chunk.part, chunk.parts) for chunk in chunks] == places
    end, joined = 0, ""
    for chunk in chunks:
        assert read_tokens(chunk.title, chunk.text) <= 40
        assert document.text[chunk.start :].startswith(chunk.text) and chunk.start <= end
        joined += chunk.text[end - chunk.start :]
        assert (chunk.start + len(chunk.text) > end) or not document.text
        end = chunk.start + len(chunk.text)
    assert joined == document.text
    if read_tokens(document.title, document.text) <= 40:
        assert chunks == [Chunk("doc", document.title, document.text, 1, 1, 0)]


@given(texts, titles)
def test_any_text_is_split_into_slices_that_the_embedder_reads_whole(text, title):
    check(Document("doc", title, text))


def test_a_long_title_without_a_text_is_one_chunk():
    (chunk,) = split("", "Orrin is a harbour town " * 10)
    assert (chunk.title, chunk.text) == ("Orrin is a harbour town Orrin is a", "")


@given(prose)
def test_chunks_repeat_whole_words_up_to_the_overlap(text):
    for before, after in pairwise(split(text)):
        repeated = text[after.start : before.start + len(before.text)]
        assert count(repeated) <= 8
        assert text[after.start - 1].isspace()


SHORT = st.lists(st.sampled_from(WORDS), min_size=2, max_size=8).map(
    lambda words: " ".join(words).capitalize()
)
short_sentences = st.tuples(SHORT, st.sampled_from([".", "!", '."']), st.sampled_from([" ", "\n", "  "])).map(
    "".join
)


@settings(max_examples=40)
@given(st.lists(short_sentences, min_size=1, max_size=40).map("".join))
def test_chunks_and_what_they_repeat_are_whole_sentences_even_if_lines_are_wrapped(text):
    for chunk in split(text, tokens=64, overlap=0):
        assert re.search(r'[.!]"?\s*$', chunk.text)
    for chunk in [*split(text, tokens=64, overlap=0), *split(text, tokens=64, overlap=16)]:
        assert chunk.start == 0 or re.search(r'[.!]"?\s+$', text[: chunk.start])


@pytest.mark.parametrize("torn", ["e.g. ", "Dr. ", "J. ", "1. ", "12. ", "i.e. ", "vs. ", "approx. of "])
def test_a_full_stop_of_an_abbreviation_or_a_number_ends_no_sentence(torn):
    text = f"The harbour of {torn}Orrin is old and large"
    assert not list(SENTENCE_END.finditer(text))


# --- Markdown ----------------------------------------------------------------------------------------------

CODE = st.lists(
    st.sampled_from(["x = 1", "", "# no heading", "call(x). Then()", "    y = [1, 2]"]), max_size=9
)
FENCES = CODE.map(lambda lines: "\n".join(["```python", *lines, "```", ""]) + "\n")
HEADINGS = st.sampled_from(["# Orrin\n\n", "## The harbour\n", "Vell\n----\n\n"])
TABLES = st.integers(1, 4).map(lambda rows: "| a | b |\n|---|---|\n" + "| one | two |\n" * rows + "\n")
LISTS = st.lists(sentences, min_size=1, max_size=4).map(
    lambda items: "".join(f"- {one}.\n" for one in items) + "\n"
)
markdown = st.lists(
    st.one_of(prose.map(lambda text: f"{text}\n\n"), FENCES, HEADINGS, TABLES, LISTS), max_size=9
).map("".join)


def split_markdown(text: str, title: str = "", overlap: int = 8) -> list[Chunk]:
    return chunker(40, overlap).split(Document("doc", title, text, markdown=True))


@settings(max_examples=50)
@given(markdown, titles)
def test_markdown_is_split_in_the_same_way(text, title):
    check(Document("doc", title, text, markdown=True))


def wholes(text: str) -> list[str]:
    """The fences and tables of a text, as the reference parser finds them."""
    lines = text.splitlines(keepends=True)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return ["".join(lines[slice(*token.map)]) for token in tokens if token.type in ("fence", "table_open")]


@settings(max_examples=50)
@given(markdown)
def test_a_fence_or_table_that_fits_is_whole_in_a_chunk(text):
    chunks = [chunk.text for chunk in split_markdown(text)]
    for part in wholes(text):
        if read_tokens("", part) <= 40:
            assert any(part in chunk for chunk in chunks)


@settings(max_examples=50)
@given(markdown)
@example("Orrin Orrin Orrin Orrin Orrin. \n\n# Orrin\n\n# Orrin\n\n```\nx = 1\nx = 1\nx = 1\nx = 1\n```\n\n")
def test_no_chunk_ends_with_a_heading_alone_unless_what_follows_fills_one(text):
    for chunk in split_markdown(text, overlap=0)[:-1]:
        last = chunk.text.rstrip().rpartition("\n")[2]
        rest = text[chunk.start + len(chunk.text) :]
        follows = next((part for part in wholes(text) if rest.startswith(part)), None)
        if last.startswith(("# ", "## ")) and "```" not in chunk.text:
            assert follows or chunk.text.strip() == last


def test_a_chunk_begins_at_a_heading_where_one_is_in_reach():
    section = "## The harbour {}\n\nThe harbour of Orrin is old. Nobody knows its age.\n\n"
    chunks = split_markdown("".join(section.format(n) for n in range(6)), overlap=8)
    assert len(chunks) >= 3 and all(chunk.text.startswith("## The harbour") for chunk in chunks)


def test_a_fence_longer_than_a_chunk_is_cut_between_lines():
    text = "Run this:\n\n```\n" + "".join(f"call(argument_{n})\n" for n in range(40)) + "```\n"
    chunks = split_markdown(text, overlap=10)
    assert len(chunks) > 4 and all(chunk.text.endswith("\n") for chunk in chunks)
    assert all(text[chunk.start - 1] == "\n" for chunk in chunks[1:])
    assert any(after.start < before.start + len(before.text) for before, after in pairwise(chunks))


def test_a_chunk_id_changes_with_its_text_and_not_with_what_follows():
    text = "Orrin is a town. " * 20
    ids, changed = ([chunk.id for chunk in split(t)] for t in (text, text + "It has a harbour."))
    assert ids[0] == changed[0] and ids[-1] != changed[-1]


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("The town of Orrin", "The town of Orrin"),
        ("A very long title " * 30, "A very long title A very long title A very"),  # a quarter of 40
    ],
)
def test_the_title_is_repeated_on_each_chunk_and_leaves_room_for_text(title, shown):
    chunks = split("Orrin is a town. " * 40, title)
    assert len(chunks) > 1 and {chunk.title for chunk in chunks} == {shown}


def test_the_passage_prefix_counts():
    prefixed = Embedder(EmbedderSpec("packaged-minilm", "cpu"))
    prefixed.prefixes = Prefixes("query: ", "passage: ")
    splitter = Chunker(prefixed, Chunking(40, 0))
    chunks = splitter.split(Document("doc", "", "harbour " * 200))
    assert all(count(f"passage: {chunk.text}") <= 38 for chunk in chunks)
    assert max(count(chunk.text) for chunk in chunks) == 36


def test_chunks_are_never_longer_than_the_embedder_reads():
    splitter = Chunker(embedder(), Chunking(4000, 32))
    chunks = splitter.split(Document("doc", "", "harbour " * 600))
    assert max(count(chunk.text) for chunk in chunks) + 2 == embedder().max_tokens


def test_splitting_takes_time_in_proportion_to_the_text():
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
def test_sizes_that_do_not_fit_together_are_refused(tokens, overlap):
    with pytest.raises(ChunkingError, match=f"chunks of {tokens} tokens with {overlap} repeated"):
        Chunking(tokens, overlap)


def test_an_overlap_too_large_for_what_the_embedder_reads_is_refused():
    with pytest.raises(ChunkingError, match="packaged-minilm reads 256 tokens"):
        Chunker(embedder(), Chunking(512, 128))
