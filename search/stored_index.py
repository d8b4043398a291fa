"""What an index is to its service, whichever back end stores it.

    with closing(index.open()) as store:     # a `ChromaIndex`, `ShardedIndex` or `FaissIndex`
        store.check_embedder(embedder)
        store.query(embeddings, topk=3)

An index records how it was built (`CollectionInfo`), so that queries of another embedder are refused. Neither
Chroma nor FAISS is imported here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from search.embedders import Embedder, model_identity
from search.errors import StoreError, StoreUnavailable
from search.wire import ScoredPassage

# Raised when what is written changes, or how texts are split: older collections must then be rebuilt.
SCHEMA_VERSION = 3
DISTANCE: Literal["cosine"] = "cosine"
# The same text through the same weights differs by precision only (fp16 against fp32: about 1e-3).
SAME_VECTOR_COSINE = 0.99
_OF_A_SHARD = ("shard", "whole")
_LATER = ("draws", *_OF_A_SHARD)
"""What the metadata of a collection need not have."""


@dataclass(frozen=True)
class CollectionInfo:
    """How a collection was built: from `documents`, split into the `chunks` that it holds.

    `version` is a hash of the documents and of how they were split (`chunk_tokens`, `chunk_overlap`).
    """

    embedder: str
    revision: str
    dimension: int
    query_prefix: str
    passage_prefix: str
    documents: int
    chunks: int
    chunk_tokens: int
    chunk_overlap: int
    version: str
    distance: str = DISTANCE
    normalised: bool = True
    schema_version: int = SCHEMA_VERSION
    draws: int = 0
    """`search.chroma.store.DRAWS` if each record of a Chroma has its `draw`; those of other tools and of
    earlier
    versions have none."""
    shard: str = ""
    """Of a shard its number and how many there are, such as 0/4."""
    whole: str = ""
    """Of a shard the `version` that one collection of all shards' documents would have."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> "CollectionInfo | None":
        """Read a collection's metadata; None if it is not one of ours."""
        names = [field.name for field in fields(cls)]
        if metadata is None or any(name not in metadata for name in names if name not in _LATER):
            return None
        return cls(**{name: metadata[name] for name in names if name in metadata})

    def to_metadata(self) -> dict[str, str | int | bool]:
        """Return the metadata to write: of an index that is no shard nothing about shards."""
        return {name: value for name, value in asdict(self).items() if value != "" or name not in _OF_A_SHARD}


class StoredIndex(Protocol):
    """An open index; its queries may come from several threads."""

    name: str
    info: CollectionInfo

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best first.

        The score is the cosine similarity. A `topk` beyond the index's size gives all. Raises
        StoreUnavailable when the index that was opened cannot answer now.
        """

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless queries of `embedder` may be compared with this index's vectors."""

    def check_content(self) -> bool:
        """Whether hashes were recorded at the build; raises StoreError unless the files have them."""

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages that have these ids, as they are embedded but for the prefix."""

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return those of some documents' ids of which the index has the whole or a chunk."""

    def close(self) -> None:
        """Release the files or connections."""


class Index(Protocol):
    """Where an index is, before it is opened."""

    @property
    def setting(self) -> str:
        """The config key that says so."""

    @property
    def name(self) -> str:
        """What its passages are known by."""

    @property
    def folder(self) -> Path | None:
        """What to copy to have the index elsewhere; None of a server."""

    def open(self) -> StoredIndex:
        """Open it; raises StoreError if it cannot be used, StoreNotReady if it may be later."""

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every passage; raises StoreError."""

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]] | None:
        """Yield the same in an order random by `seed`, so that the first are a sample and cost little.

        None of an index that cannot do that without reading all. Raises StoreError.
        """


def passage_text(title: str, text: str) -> str:
    """Return the text that is embedded for a document, without the passage prefix."""
    return f"{title}\n{text}" if title else text


def check_records(index: str, info: CollectionInfo, embedder: Embedder) -> None:
    """Raise StoreError unless the index was built with this embedder's name, prefixes and dimension."""
    if model_identity(embedder.name) != model_identity(info.embedder):
        raise other_embedder(index, info, embedder, "its model is", info.embedder, embedder.name)
    for what, stored, ours in (
        ("its query prefix is", info.query_prefix, embedder.prefixes.query),
        ("its passage prefix is", info.passage_prefix, embedder.prefixes.passage),
        ("its dimension is", info.dimension, embedder.dimension),
        ("normalised vectors:", info.normalised, True),
    ):
        if stored != ours:
            raise other_embedder(index, info, embedder, what, stored, ours)


def cosine_again(embedder: Embedder, text: str, stored: ArrayLike) -> float:
    """Embed a stored passage again; return the cosine with its stored vector, of whatever length."""
    vector = np.asarray(stored, dtype=np.float32)
    length = max(float(np.linalg.norm(vector)), 1e-12)
    return float(np.dot(embedder.encode_passages([text])[0], vector)) / length


def other_embedder(
    index: str, info: CollectionInfo, embedder: Embedder, what: str, stored: object, ours: object
) -> StoreError:
    """The error for an index of another embedder."""
    return StoreError(
        f"{index} was built with another embedder than {embedder.name!r}: {what} {stored!r}, not {ours!r}. "
        f"Serve it with --embedder {info.embedder}, or index it again"
    )


def another_version(index: str, now: CollectionInfo, served: CollectionInfo) -> StoreUnavailable:
    """The error for an index that was replaced while it is served."""
    return StoreUnavailable(
        f"{index} is another version now ({now.version[:12]}, and {served.version[:12]} is served): restart "
        "the server to serve it"
    )
