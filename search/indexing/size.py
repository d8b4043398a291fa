"""Estimate an index's memory, disk and hours, within `FACTOR` from some thousand chunks on."""

import math
from dataclasses import dataclass

from search.chroma.store import HNSW

FACTOR = 1.5  # How far a real index may be off, depending on its texts and ids
LINKS = 8 * HNSW["max_neighbors"] + 4  # Bytes of a vector's links on the first level, and their count
ABOVE = 4 + (4 * HNSW["max_neighbors"] + 4) / (HNSW["max_neighbors"] - 1)
"""Bytes of its links above: a block per level, and one vector in `max_neighbors` reaches the next."""
LABEL = 8 + 4  # Bytes of its label, and of its length
ID = 68  # Bytes of an id in `index_metadata.pickle`, for ids of 24 characters
RECORD = 300  # Bytes of a record in Chroma's database besides its text: metadata and their indices
TEXT_IN_CHROMA = 9  # Bytes per byte of text: three copies, and an index of trigrams. Measured on our docs.
SERVED = 750  # Bytes of memory per vector besides its numbers: links, and its id in two tables. Measured.
BUILT = 1400  # The same while building: the process grew by 1,900 bytes a vector
GROWTH = 2  # Copies of a vector in memory while building: the graph doubles by copying
JOURNAL_RECORD = 450  # Bytes per chunk in the journal besides text and vector: ids, digests, indices
TOKEN_BYTES = 4  # Bytes of English prose per embedder token. Code and other languages have fewer.
GRAPH_S = 0.76e-3  # Seconds to insert a vector into the graph below, on two cores (bench/README.md)
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
        """Seconds on two cores, low and high: a vector costs the graph's logarithm to its cube root."""
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
        """Seconds to insert the vectors: low if parallel writers do not slow each other down."""
        each = IndexSize(self.chunks // self.shards, self.dimension, self.text_bytes // self.shards)
        low, high = each.graph_seconds
        return self.shards * low / self._at_once, self.shards * high


@dataclass(frozen=True)
class Planned:
    """The work ahead of a build: embed `chunks` chunks of `text_bytes`, for an index of `size`."""

    size: IndexSize
    chunks: int
    text_bytes: int
    operations: int  # the embedder's floating-point operations per token
    there: int  # bytes of it already on disk

    def embedding_seconds(self, speed: float) -> float:
        """Seconds to embed at `speed` floating-point operations per second."""
        return self.text_bytes / TOKEN_BYTES * self.operations / speed


# --- FAISS ---

KINDS = ("flat", "hnsw", "ivfpq")
# Same algorithm and values as Chroma's graphs here (search/chroma/store.py).
FAISS_LINKS, CONSTRUCTION = 32, 200
CODES = 256  # Values of a byte of a PQ code, each with its own centroid
LEAST_POINTS = 39  # Sample vectors per centroid that FAISS asks for
_LISTS = 4  # IVF lists per square root of the vectors. FAISS recommends 4 to 16.
_SAMPLE = 50  # Sample vectors per list
_CODE_NUMBERS = 4  # Numbers per byte of PQ code: a sixteenth of the memory
_LINKED = 4 * 2 * FAISS_LINKS + 4 + 8 + 4 * FAISS_LINKS / (FAISS_LINKS - 1)  # bytes of its links: 272
_ID = 8
_LINE = 330  # Bytes of a corpus line besides title and text (names, ids, digest), and 8 for its offset
_SAMPLES = 3  # Copies of the sample in memory while an IVF index is trained
_ROUNDS, _CODE_ROUNDS = 10, 25  # FAISS's own rounds of k-means, for lists and for codes
_SPEEDS = (120e9, 40e9)  # Operations per second of two cores in matrix products, assumed: fast and slow


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
