"""What an index of so many vectors takes: memory to serve and to build it, disk, hours.

    size = IndexSize(chunks=21_000_000, dimension=768, text_bytes=21_000_000 * 650)
    size.serving_bytes, size.disk_while_building, size.graph_seconds

Arithmetic only; each constant says where it was measured. From some thousand chunks on a real index is within
`FACTOR` of it (a test builds one); below, fixed sizes of some 100 KB count for more.
"""

import math
from dataclasses import dataclass

from search.chroma.store import HNSW

FACTOR = 1.5
"""How far the sizes may be from a real index's, which depend on its texts and ids."""
LINKS = 8 * HNSW["max_neighbors"] + 4
"""Bytes of a vector's links on the first level: twice `max_neighbors` numbers of 4 bytes, and their count."""
ABOVE = 4 + (4 * HNSW["max_neighbors"] + 4) / (HNSW["max_neighbors"] - 1)
"""Bytes of its links above: a block for each level, and one vector in `max_neighbors` is on the next."""
LABEL = 8 + 4
"""Bytes of its label, and of its length."""
ID = 68
"""Bytes of an id in `index_metadata.pickle`, for ids of 24 characters."""
RECORD = 300
"""Bytes of a record in Chroma's database besides its text: metadata and their indices."""
TEXT_IN_CHROMA = 9
"""Bytes in Chroma's database for a byte of text: it is there three times, and its trigrams are an index of
their own. Measured on this project's docs: 3.6 KB for 400 characters, 12 KB for 1,200."""
SERVED = 750
"""Bytes of memory for a vector besides its numbers, served: its links, and its id in two tables. From 10,000
to 40,000 vectors of 64 numbers with ids of 24 characters, an opened collection grew by 960 bytes a vector."""
BUILT = 1400
"""The same while it is built: there the process grew by 1,900 bytes a vector."""
GROWTH = 2
"""Numbers of a vector in memory while a graph is built: the graph grows to twice its size by copying."""
JOURNAL_RECORD = 450
"""Bytes of a chunk in the journal besides text and vector: ids and digests in three tables, and indices."""
TOKEN_BYTES = 4
"""Bytes of English prose for a token of an embedder's tokenizer; code and other languages have fewer."""
GRAPH_S = 0.76e-3
"""Seconds to insert a vector of 384 numbers into a graph of 100,000 on two cores (bench/hnsw.py)."""
GRAPH_VECTORS, GRAPH_DIMENSION = 100_000, 384


@dataclass(frozen=True)
class IndexSize:
    """An index by its chunks, the length of their vectors, and the bytes of all their texts."""

    chunks: int
    dimension: int
    text_bytes: int

    @property
    def vector_bytes(self) -> int:
        """The vectors' numbers, float32."""
        return 4 * self.chunks * self.dimension

    @property
    def serving_bytes(self) -> int:
        """Memory of a service beyond what it takes for an empty index."""
        return self.vector_bytes + SERVED * self.chunks

    @property
    def building_bytes(self) -> int:
        """Memory of Chroma while it writes the collection, beyond what it takes for an empty one."""
        return GROWTH * self.vector_bytes + BUILT * self.chunks

    @property
    def disk_bytes(self) -> int:
        """The folder of the finished index: vector files, and Chroma's database with the texts."""
        files = self.vector_bytes + (LINKS + ABOVE + LABEL + ID) * self.chunks
        return round(files + RECORD * self.chunks + TEXT_IN_CHROMA * self.text_bytes)

    @property
    def journal_bytes(self) -> int:
        """The journal at its largest, next to that folder: texts and vectors."""
        return self.vector_bytes + JOURNAL_RECORD * self.chunks + self.text_bytes

    @property
    def disk_while_building(self) -> int:
        """Journal and folder together, as it is before the journal is removed."""
        return self.disk_bytes + self.journal_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds on two cores to insert the vectors: low and high.

        A vector takes longer in a larger graph: by the depth of the search, a logarithm, at the least; by
        what 20,000 and 100,000 vectors took, with the cube root of their number.
        """
        each = GRAPH_S * self.dimension / GRAPH_DIMENSION
        more = max(self.chunks, 2) / GRAPH_VECTORS
        low, high = sorted((math.log(max(self.chunks, 2)) / math.log(GRAPH_VECTORS), more ** (1 / 3)))
        return self.chunks * each * low, self.chunks * each * high


@dataclass(frozen=True)
class ShardedSize(IndexSize):
    """An index in `shards` alike, of which `writers` are inserted at once."""

    shards: int
    writers: int

    @property
    def _at_once(self) -> int:
        return min(self.writers, self.shards)

    @property
    def building_bytes(self) -> int:
        """Memory of the processes that insert at once, each a shard."""
        return super().building_bytes * self._at_once // self.shards

    @property
    def journal_bytes(self) -> int:
        """The journals of all shards at their largest, and the corpus cut into a file for each."""
        return super().journal_bytes + self.text_bytes

    @property
    def graph_seconds(self) -> tuple[float, float]:
        """Seconds to insert the vectors: low if what is inserted at once takes no longer, high if it does."""
        each = IndexSize(self.chunks // self.shards, self.dimension, self.text_bytes // self.shards)
        low, high = each.graph_seconds
        return self.shards * low / self._at_once, self.shards * high


@dataclass(frozen=True)
class Planned:
    """What a build is about to do: embed `chunks` chunks, of so many `text_bytes`, for an index of `size`."""

    size: IndexSize
    chunks: int
    text_bytes: int
    operations: int
    """Floating-point operations of the embedder for a token."""
    there: int
    """Bytes of it that the disk holds already."""

    def embedding_seconds(self, speed: float) -> float:
        """Seconds to embed at `speed` floating-point operations a second."""
        return self.text_bytes / TOKEN_BYTES * self.operations / speed
