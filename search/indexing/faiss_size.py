"""How a FAISS index of so many vectors is made, and what it takes: memory, disk, hours.

    size = FaissSize(chunks=21_000_000, dimension=768, text_bytes=21_000_000 * 650, kind="ivfpq")
    size.serving_bytes, size.disk_while_building, size.graph_seconds

Arithmetic only, as in `search.indexing.size`. Nothing here imports FAISS.
"""

import math
from dataclasses import dataclass

from search.indexing.size import GROWTH, IndexSize

KINDS = ("flat", "hnsw", "ivfpq")
# As Chroma's graphs here (search/chroma/store.py), which bench/hnsw.py measured: both are of the same
# algorithm.
LINKS, CONSTRUCTION = 32, 200
CODES = 256
"""Values of a byte of a PQ code, each with a centroid of its own."""
LEAST_POINTS = 39
"""Vectors of a sample for each centroid that FAISS asks for."""
_LISTS = 4
"""Lists of an IVF index by the square root of its vectors: FAISS's guidelines have 4 to 16, of which fewer
need the smallest sample."""
_SAMPLE = 50
"""Vectors of the sample for each list."""
_CODE_NUMBERS = 4
"""Numbers of a vector in a byte of its PQ code: a sixteenth of the memory. FAISS itself suggests 2 to 4 where
codes are not compared with the vectors afterwards."""
_LINKED = 4 * 2 * LINKS + 4 + 8 + 4 * LINKS / (LINKS - 1)
"""Bytes of a vector's links in a file: on the first level, its level and place, and on the levels above. The
272 bytes that files of 10,000 and 20,000 vectors have."""
_ID = 8
_LINE = 330
"""Bytes of a line of the corpus besides title and text: names, ids, digest; and 8 where lines begin."""
_SAMPLES = 3
"""Copies of the sample in memory while an IVF index is trained."""
_ROUNDS, _CODE_ROUNDS = 10, 25
"""Rounds of k-means: FAISS's own, for lists and for codes."""
_SPEEDS = (120e9, 40e9)
"""Operations a second of two cores in matrix products, assumed: fast and slow."""


def lists_of(chunks: int) -> int:
    """Return the lists of an IVF index."""
    return max(1, min(round(_LISTS * math.sqrt(chunks)), chunks // LEAST_POINTS))


def sample_of(chunks: int) -> int:
    """Return the vectors that an IVF-PQ index is trained on."""
    return min(chunks, max(_SAMPLE * lists_of(chunks), LEAST_POINTS * CODES))


def code_bytes(dimension: int) -> int:
    """Return the bytes of a vector's PQ code, which divide its numbers."""
    most = max(dimension // _CODE_NUMBERS, 1)
    return next(count for count in range(most, 0, -1) if dimension % count == 0)


@dataclass(frozen=True)
class FaissSize(IndexSize):
    """A FAISS index of a kind, as `search.indexing.faiss_folder` builds it."""

    kind: str

    @property
    def serving_bytes(self) -> int:
        """The index's file, of which a service reads much; the corpus is read by its lines."""
        if self.kind == "flat":
            return self.vector_bytes
        if self.kind == "hnsw":
            return self.vector_bytes + round(_LINKED * self.chunks)
        coarse = 4 * self.dimension * (lists_of(self.chunks) + CODES)
        return (code_bytes(self.dimension) + _ID) * self.chunks + coarse

    @property
    def building_bytes(self) -> int:
        """FAISS grows what it holds by copying it; an IVF index is trained on a sample before."""
        sample = 4 * self.dimension * sample_of(self.chunks) if self.kind == "ivfpq" else 0
        return max(GROWTH * self.serving_bytes, _SAMPLES * sample)

    @property
    def disk_bytes(self) -> int:
        """The folder of the finished index: index, corpus, where its lines begin."""
        return self.serving_bytes + _LINE * self.chunks + self.text_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds on two cores to insert the vectors, or to train an IVF index and find lists and codes."""
        if self.kind == "flat":
            return 0.0, 0.0
        if self.kind == "hnsw":
            return super().graph_seconds
        sample = sample_of(self.chunks)
        compared = lists_of(self.chunks) * (self.chunks + _ROUNDS * sample)
        compared += CODES * (self.chunks + _CODE_ROUNDS * sample)
        fast, slow = (2 * self.dimension * compared / speed for speed in _SPEEDS)
        return fast, slow
