"""The parameters of a FAISS index, and its memory, disk and hours.

    FaissSize(chunks=21_000_000, dimension=768, text_bytes=21_000_000 * 650, kind="ivfpq").serving_bytes

Arithmetic only, as in `search.indexing.size`. This module does not import FAISS.
"""

import math
from dataclasses import dataclass

from search.indexing.size import GROWTH, IndexSize

KINDS = ("flat", "hnsw", "ivfpq")
# Same algorithm and values as Chroma's graphs here (search/chroma/store.py).
LINKS, CONSTRUCTION = 32, 200
CODES = 256
"""Values of a byte of a PQ code, each with its own centroid."""
LEAST_POINTS = 39
"""Sample vectors per centroid that FAISS asks for."""
_LISTS = 4
"""IVF lists per square root of the vectors. FAISS recommends 4 to 16, and few need the smallest sample."""
_SAMPLE = 50
"""Sample vectors per list."""
_CODE_NUMBERS = 4
"""Numbers per byte of PQ code: a sixteenth of the memory. FAISS suggests 2 to 4 without re-ranking."""
_LINKED = 4 * 2 * LINKS + 4 + 8 + 4 * LINKS / (LINKS - 1)
"""Bytes of a vector's links: 272, as in files of 10,000 and 20,000 vectors."""
_ID = 8
_LINE = 330
"""Bytes of a corpus line besides title and text (names, ids, digest), and 8 for its offset."""
_SAMPLES = 3
"""Copies of the sample in memory while an IVF index is trained."""
_ROUNDS, _CODE_ROUNDS = 10, 25
"""FAISS's own rounds of k-means, for lists and for codes."""
_SPEEDS = (120e9, 40e9)
"""Operations per second of two cores in matrix products, assumed: fast and slow."""


def lists_of(chunks: int) -> int:
    """Return the lists of an IVF index."""
    return max(1, min(round(_LISTS * math.sqrt(chunks)), chunks // LEAST_POINTS))


def sample_of(chunks: int) -> int:
    """Return how many vectors an IVF-PQ index is trained on."""
    return min(chunks, max(_SAMPLE * lists_of(chunks), LEAST_POINTS * CODES))


def code_bytes(dimension: int) -> int:
    """Return the bytes of a vector's PQ code, a divisor of its dimension."""
    most = max(dimension // _CODE_NUMBERS, 1)
    return next(count for count in range(most, 0, -1) if dimension % count == 0)


@dataclass(frozen=True)
class FaissSize(IndexSize):
    """The size of a FAISS index that `search.indexing.faiss_folder` builds."""

    kind: str

    @property
    def serving_bytes(self) -> int:
        """The index file. The corpus is read line by line."""
        if self.kind == "flat":
            return self.vector_bytes
        if self.kind == "hnsw":
            return self.vector_bytes + round(_LINKED * self.chunks)
        coarse = 4 * self.dimension * (lists_of(self.chunks) + CODES)
        return (code_bytes(self.dimension) + _ID) * self.chunks + coarse

    @property
    def building_bytes(self) -> int:
        """FAISS grows by copying, and trains an IVF index on a sample first."""
        sample = 4 * self.dimension * sample_of(self.chunks) if self.kind == "ivfpq" else 0
        return max(GROWTH * self.serving_bytes, _SAMPLES * sample)

    @property
    def disk_bytes(self) -> int:
        """Index, corpus and line offsets."""
        return self.serving_bytes + _LINE * self.chunks + self.text_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds on two cores to insert the vectors, or to train an IVF index and assign lists and codes."""
        if self.kind == "flat":
            return 0.0, 0.0
        if self.kind == "hnsw":
            return super().graph_seconds
        sample = sample_of(self.chunks)
        compared = lists_of(self.chunks) * (self.chunks + _ROUNDS * sample)
        compared += CODES * (self.chunks + _CODE_ROUNDS * sample)
        fast, slow = (2 * self.dimension * compared / speed for speed in _SPEEDS)
        return fast, slow
