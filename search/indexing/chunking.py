"""Split documents into chunks that the embedder reads in full, prefix, title and special tokens included.

A chunk begins with the last sentences or words of the one before, so that a fact at the cut stays complete.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from search.embedders import Embedder
from search.indexing.boundaries import LINE_END, Boundaries, Cut, Span
from search.sources.document import CorpusError, Document
from search.stored_index import passage_text

# If you change how texts are split, raise `search.stored_index.SCHEMA_VERSION`.

# Text with more characters per token is split without counting, to bound memory.
CHARACTERS_PER_TOKEN = 64
WINDOW_CHARACTERS_PER_TOKEN = 8
WORD_START = re.compile(r"(?<=\s)\S")
Offsets = list[tuple[int, int]]  # of tokens in a text: start and end


class ChunkingError(CorpusError):
    """Chunk sizes that do not fit together, or do not fit the embedder."""


def document_of(chunk_id: str) -> str:
    """Return the id of a chunk's document. A document in one chunk has the chunk's id."""
    return re.sub(r"#\d+-[0-9a-f]{12}$", "", chunk_id)


@dataclass(frozen=True)
class Chunking:
    """How to split documents: at most `tokens` a chunk, prefix and title included, `overlap` repeated."""

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
    """Part `part` of `parts` of a document, from the character `start` of its text."""

    id: str
    title: str
    text: str
    part: int
    parts: int
    start: int


class Chunker:
    """Splits documents for one embedder, which it loads."""

    def __init__(self, embedder: Embedder, chunking: Chunking) -> None:
        self.prefix = embedder.prefixes.passage
        self.limit = min(chunking.tokens, embedder.max_tokens or chunking.tokens)
        self.overlap = chunking.overlap
        self._tokenizer: Tokenizer = embedder.plain_tokenizer()
        # A title takes at most a quarter, which leaves half a chunk for text.
        if self.limit - self.limit // 4 - self._count("", "") < max(2 * self.overlap, self.limit // 2):
            raise ChunkingError(
                f"{embedder.name} reads {self.limit} tokens, and its prefix and special tokens take "
                f"{self._count('', '')}: that leaves too little for chunks that repeat {self.overlap} "
                "(chunk_overlap)"
            )

    def split(self, document: Document) -> list[Chunk]:
        """Return the document's chunks in order."""
        title, text = document.title, document.text
        is_small = len(title) + len(text) <= self.limit * CHARACTERS_PER_TOKEN
        if is_small and self._count(title, text) <= self.limit:
            return [Chunk(document.id, title, text, 1, 1, 0)]
        # Every chunk repeats the title, cut to a quarter of the limit.
        title = title[: self.limit * WINDOW_CHARACTERS_PER_TOKEN]
        offsets = self._offsets(title)
        if len(offsets) > (most := self.limit // 4):
            title = title[: offsets[most][0]].rstrip()
        spans = list(self._spans(title, Boundaries(text, document.markdown)))
        chunks = []
        for part, (start, end) in enumerate(spans, start=1):
            content = hashlib.sha256(passage_text(title, text[start:end]).encode()).hexdigest()
            key = f"{document.id}#{part}-{content[:12]}"  # as document_of reads it
            chunks.append(Chunk(key, title, text[start:end], part, len(spans), start))
        return chunks

    def _count(self, title: str, text: str) -> int:
        return len(self._tokenizer.encode(self.prefix + passage_text(title, text)).ids)

    def _offsets(self, text: str) -> Offsets:
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def _spans(self, title: str, boundaries: Boundaries) -> Iterator[tuple[int, int]]:
        """Yield each chunk's start and end. Only a window is tokenized at a time, so memory stays bounded."""
        text, budget = boundaries.text, self.limit - self._count(title, "")
        start = done = 0
        while True:
            window_end = min(start + budget * WINDOW_CHARACTERS_PER_TOKEN, len(text))
            offsets = self._offsets(text[start:window_end])
            cut = self._cut(title, start, window_end, offsets, budget, boundaries)
            if start < cut.place <= done:  # only repeated text fits in front of a whole part
                start = done
                continue
            yield start, cut.place
            if cut.place == len(text):
                return
            done = cut.place
            start = self._next_start(start, offsets, cut, boundaries)

    def _next_start(self, start: int, offsets: Offsets, cut: Cut, boundaries: Boundaries) -> int:
        """Where the chunk after a cut begins: up to `overlap` tokens before it."""
        inside = sum(start + token_start < cut.place for token_start, _ in offsets)
        repeated = min(self.overlap, inside // 2)
        if not repeated or cut.is_section:
            return cut.place
        earliest = start + offsets[inside - repeated][0]
        if (sentence := boundaries.beginning(earliest, cut.place)) is not None:
            return sentence
        if cut.is_end:
            return cut.place
        text = boundaries.text
        # Whole lines, such as code, are followed by whole lines.
        line = LINE_END.search(text, earliest, cut.place - 1) if text[cut.place - 1] == "\n" else None
        if line:
            return line.end()
        word = WORD_START.search(text, earliest, cut.place)
        return word.start() if word else earliest

    def _cut(
        self, title: str, start: int, window_end: int, offsets: Offsets, budget: int, boundaries: Boundaries
    ) -> Cut:
        text = boundaries.text

        def fits(part: Span) -> bool:
            is_small = part.end - part.start <= self.limit * CHARACTERS_PER_TOKEN
            return is_small and self._count(title, text[part.start : part.end]) <= self.limit

        tokens = min(budget, len(offsets))
        cut = Cut(window_end, True)
        if tokens < len(offsets) or window_end < len(text):
            most = start + offsets[tokens][0] if tokens < len(offsets) else window_end
            cut = boundaries.cut(start, most, fits)
        # Cutting the first or last word can add tokens.
        while (
            excess := self._count(title, text[start : cut.place]) - self.limit
        ) > 0 and cut.place > start + 1:
            tokens = max(tokens - excess, 0)
            cut = boundaries.cut(start, min(start + offsets[tokens][0], cut.place - 1), fits)
        return cut
