"""Splitting documents into chunks that the embedder reads whole.

    chunker = Chunker(Embedder(spec), Chunking(tokens=256, overlap=32))
    chunker.split(document)

An embedder sees only so many tokens; what lies beyond cannot be found. So a document that is longer becomes
several chunks, each a slice of its text, each with the document's title. Chunks end after a sentence or a
line where one ends in their second half, else after a word, else after a token, and each begins with the
last words of the one before, so that a fact that lies across the cut is whole in one of them. Lengths are
counted with the embedder's own tokenizer on what it will read: prefix, title, text and special tokens.

Why not a library: semantic-text-splitter counts with the tokenizer's stored truncation (so that any text
fits) and takes one limit for all documents, where ours depends on the title; langchain-text-splitters
brings a dozen packages.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from search.corpus import CorpusError, Document
from search.embedders import Embedder
from search.store import passage_text

# Whatever changes how a text is split also raises `search.store.SCHEMA_VERSION`.

# Text of more characters a token than this is split without counting: a bound on memory.
CHARACTERS_A_TOKEN = 64
WINDOW_CHARACTERS_A_TOKEN = 8
# Not after a digit: "5. " begins an entry of a list more often than it ends a sentence.
SENTENCE_END = re.compile(r"\n|(?<!\d)[.!?…][\"'”’)\]]*\s|[。！？]")
WORD_END = re.compile(r"\s")
WORD_START = re.compile(r"(?<=\s)\S")


class ChunkingError(CorpusError):
    """Chunk sizes that do not fit together or do not fit the embedder."""


@dataclass(frozen=True)
class Chunking:
    """How documents are split: `tokens` is the size of a chunk as it is read, prefix and title included.

    256 by default, or what the embedder reads if that is less: as much as a challenger prompt shows of a
    document, and more than the search tool shows of a passage; a vector of more text says less of each part.
    `overlap` is how many tokens of a chunk are repeated in the next one, at most: a sentence or two.
    """

    tokens: int = 256
    overlap: int = 32

    def __post_init__(self) -> None:
        if self.tokens < 32 or not 0 <= self.overlap <= self.tokens // 4:
            raise ChunkingError(
                f"chunks of {self.tokens} tokens with {self.overlap} repeated: a chunk needs at least 32 "
                "tokens, and repeats at most a quarter of them (chunk_tokens, chunk_overlap)"
            )


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, the `place`-th of `places`, from the character `start` of its text on."""

    id: str
    title: str
    text: str
    place: int
    places: int
    start: int


class Chunker:
    """Splits documents for one embedder; loads the embedder."""

    def __init__(self, embedder: Embedder, chunking: Chunking) -> None:
        self.prefix = embedder.prefixes.passage
        self.limit = min(chunking.tokens, embedder.max_tokens or chunking.tokens)
        self.overlap = chunking.overlap
        self._tokenizer: Tokenizer = embedder.plain_tokenizer()
        # A title takes at most a quarter, so that half a chunk is left for text.
        if self.limit - self.limit // 4 - self._count("", "") < max(2 * self.overlap, self.limit // 2):
            raise ChunkingError(
                f"{embedder.name} reads {self.limit} tokens, and what goes before a text takes "
                f"{self._count('', '')}: that leaves too little for chunks that repeat {self.overlap} "
                "(chunk_overlap)"
            )

    def split(self, document: Document) -> list[Chunk]:
        """Return the document's chunks in order; one that fits is a single chunk, with its id and title."""
        if self._fits(document.title, document.text):
            return [Chunk(document.id, document.title, document.text, 1, 1, 0)]
        title = self._short(document.title)
        spans = list(self._spans(title, document.text))
        return [
            Chunk(
                _chunk_id(document.id, place, title, document.text[start:end]),
                *(title, document.text[start:end], place, len(spans), start),
            )
            for place, (start, end) in enumerate(spans, start=1)
        ]

    def _count(self, title: str, text: str) -> int:
        return len(self._tokenizer.encode(self.prefix + passage_text(title, text)).ids)

    def _fits(self, title: str, text: str) -> bool:
        if len(title) + len(text) > self.limit * CHARACTERS_A_TOKEN:
            return False
        return self._count(title, text) <= self.limit

    def _short(self, title: str) -> str:
        """A title that is repeated in each chunk, cut to a quarter of the limit."""
        beginning = title[: self.limit * WINDOW_CHARACTERS_A_TOKEN]
        offsets = self._offsets(beginning)
        most = self.limit // 4
        return beginning[: offsets[most][0]].rstrip() if len(offsets) > most else beginning

    def _spans(self, title: str, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each chunk.

        Only a window of the text is tokenised at a time: memory does not grow with the document.
        """
        budget = self.limit - self._count(title, "")
        start = 0
        while True:
            window = text[start : start + budget * WINDOW_CHARACTERS_A_TOKEN]
            offsets = self._offsets(window)
            end = self._end(title, window, offsets, budget, start + len(window) == len(text))
            yield start, start + end
            if start + end == len(text):
                return
            start += self._restart(window, offsets, end)

    def _end(self, title: str, window: str, offsets: list[tuple[int, int]], budget: int, last: bool) -> int:
        """Return where the chunk ends that begins with the window."""
        tokens = min(budget, len(offsets))
        end = len(window)
        if tokens < len(offsets) or not last:
            end = _boundary(window, offsets[tokens][0] if tokens < len(offsets) else len(window))
        # A slice may have more tokens than it had within the text: its last word is cut, or its first one.
        while (excess := self._count(title, window[:end]) - self.limit) > 0 and end > 1:
            tokens = max(tokens - excess, 0)
            end = _boundary(window, min(offsets[tokens][0], end - 1))
        return end

    def _restart(self, window: str, offsets: list[tuple[int, int]], end: int) -> int:
        """Return where the next chunk begins: up to `overlap` tokens before `end`, at a word's start."""
        inside = sum(start < end for start, _ in offsets)
        repeated = min(self.overlap, inside // 2)
        if repeated == 0:
            return end
        earliest = offsets[inside - repeated][0]
        word = WORD_START.search(window, earliest, end)
        return (word.start() if word else earliest) or end

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)


def _boundary(window: str, most: int) -> int:
    """Return the last good place to cut at or before `most`, in its second half; at least 1."""
    for pattern in (SENTENCE_END, WORD_END):
        ends = [match.end() for match in pattern.finditer(window, most // 2, most)]
        if ends:
            return ends[-1]
    return max(most, 1)


def _chunk_id(document_id: str, place: int, title: str, text: str) -> str:
    content = hashlib.sha256(passage_text(title, text).encode()).hexdigest()
    return f"{document_id}#{place}-{content[:12]}"
