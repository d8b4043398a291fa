"""Estimate an index's needs: memory to serve and to build it, disk, hours.

    IndexSize(chunks=21_000_000, dimension=768, text_bytes=21_000_000 * 650).serving_bytes

Each constant says where it was measured. From some thousand chunks on, real indices are within `FACTOR` (a
test builds one). Below, fixed sizes of some 100 KB dominate.
"""

import math
from dataclasses import dataclass

from search.chroma.store import HNSW

FACTOR = 1.5
"""How far a real index may be off, depending on its texts and ids."""
LINKS = 8 * HNSW["max_neighbors"] + 4
"""Bytes of a vector's links on the first level: twice `max_neighbors` numbers of 4 bytes, and their count."""
ABOVE = 4 + (4 * HNSW["max_neighbors"] + 4) / (HNSW["max_neighbors"] - 1)
"""Bytes of its links above: a block per level, and one vector in `max_neighbors` reaches the next."""
LABEL = 8 + 4
"""Bytes of its label, and of its length."""
ID = 68
"""Bytes of an id in `index_metadata.pickle`, for ids of 24 characters."""
RECORD = 300
"""Bytes of a record in Chroma's database besides its text: metadata and their indices."""
TEXT_IN_CHROMA = 9
"""Bytes in Chroma's database per byte of text: three copies, and an index of trigrams. Measured on this
project's docs: 3.6 KB for 400 characters, 12 KB for 1,200.
"""
SERVED = 750
"""Bytes of memory per served vector besides its numbers: links, and its id in two tables. With 10,000 to
40,000 vectors of 64 numbers and ids of 24 characters, it was 960 bytes with the numbers.
"""
BUILT = 1400
"""The same while building: the process grew by 1,900 bytes a vector."""
GROWTH = 2
"""Copies of a vector in memory while building: the graph doubles by copying."""
JOURNAL_RECORD = 450
"""Bytes per chunk in the journal besides text and vector: ids and digests in three tables, and indices."""
TOKEN_BYTES = 4
"""Bytes of English prose per embedder token. Code and other languages have fewer."""
GRAPH_S = 0.76e-3
"""Seconds to insert a vector of 384 numbers into a graph of 100,000 on two cores (bench/README.md)."""
GRAPH_VECTORS, GRAPH_DIMENSION = 100_000, 384


@dataclass(frozen=True)
class IndexSize:
    """An index's chunks, the length of their vectors, and the bytes of all texts."""

    chunks: int
    dimension: int
    text_bytes: int

    @property
    def vector_bytes(self) -> int:
        """The vectors' numbers, float32."""
        return 4 * self.chunks * self.dimension

    @property
    def serving_bytes(self) -> int:
        """Memory of a service, beyond an empty index's."""
        return self.vector_bytes + SERVED * self.chunks

    @property
    def building_bytes(self) -> int:
        """Memory of Chroma while it writes the collection, beyond an empty one's."""
        return GROWTH * self.vector_bytes + BUILT * self.chunks

    @property
    def disk_bytes(self) -> int:
        """The finished folder: vector files, and Chroma's database with the texts."""
        files = self.vector_bytes + (LINKS + ABOVE + LABEL + ID) * self.chunks
        return round(files + RECORD * self.chunks + TEXT_IN_CHROMA * self.text_bytes)

    @property
    def journal_bytes(self) -> int:
        """The journal at its largest: texts and vectors."""
        return self.vector_bytes + JOURNAL_RECORD * self.chunks + self.text_bytes

    @property
    def disk_while_building(self) -> int:
        """Journal and folder together, before the journal is removed."""
        return self.disk_bytes + self.journal_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds on two cores to insert the vectors: low and high.

        Time per vector grows at least with the logarithm of the graph's size (the search's depth), at most
        with the cube root, as from 20,000 to 100,000 vectors.
        """
        each = GRAPH_S * self.dimension / GRAPH_DIMENSION
        more = max(self.chunks, 2) / GRAPH_VECTORS
        low, high = sorted((math.log(max(self.chunks, 2)) / math.log(GRAPH_VECTORS), more ** (1 / 3)))
        return self.chunks * each * low, self.chunks * each * high


@dataclass(frozen=True)
class ShardedSize(IndexSize):
    """An index in equal `shards`, inserted by `writers` processes at once."""

    shards: int
    writers: int

    @property
    def _at_once(self) -> int:
        return min(self.writers, self.shards)

    @property
    def building_bytes(self) -> int:
        """Memory of the processes that insert at once, a shard each."""
        return super().building_bytes * self._at_once // self.shards

    @property
    def journal_bytes(self) -> int:
        """All shards' journals at their largest, and the corpus cut into a file for each."""
        return super().journal_bytes + self.text_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds to insert the vectors: low if parallel writers do not slow each other down, high if they
        do.
        """
        each = IndexSize(self.chunks // self.shards, self.dimension, self.text_bytes // self.shards)
        low, high = each.graph_seconds
        return self.shards * low / self._at_once, self.shards * high


@dataclass(frozen=True)
class Planned:
    """The work ahead of a build: embed `chunks` chunks of `text_bytes`, for an index of `size`."""

    size: IndexSize
    chunks: int
    text_bytes: int
    operations: int
    """The embedder's floating-point operations per token."""
    there: int
    """Bytes of it already on disk."""

    def embedding_seconds(self, speed: float) -> float:
        """Seconds to embed at `speed` floating-point operations per second."""
        return self.text_bytes / TOKEN_BYTES * self.operations / speed
