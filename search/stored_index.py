"""The interface between a retrieval service and its index, in either back end (without importing any)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from search.embedders import Embedder, model_identity
from search.errors import StoreError, StoreUnavailable
from search.wire import ScoredPassage

# Raise this when the written fields or the splitting change: older collections must then be rebuilt.
SCHEMA_VERSION = 3
DISTANCE: Literal["cosine"] = "cosine"
# The same text and weights differ by precision only (fp16 against fp32: about 1e-3).
SAME_VECTOR_COSINE = 0.99
DATABASE_FILE, INDEX_FILE = "chroma.sqlite3", "index.faiss"  # of a Chroma folder, and of our FAISS folder
_OF_A_SHARD = ("shard", "whole")
_LATER = ("draws", *_OF_A_SHARD)  # Metadata that a collection may lack


@dataclass(frozen=True)
class CollectionInfo:
    """How a collection was built. `version` is a hash of the `documents` and of how they were split."""

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
    draws: int = 0  # `search.chroma.store.DRAWS` if every record has its `draw`, else 0
    shard: str = ""  # its number and the number of shards, such as 0/4, else empty
    whole: str = ""  # for a shard, the `version` of all shards' documents together

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> "CollectionInfo | None":
        """Read a collection's metadata, or None if this project did not build it."""
        names = [field.name for field in fields(cls)]
        if metadata is None or any(name not in metadata for name in names if name not in _LATER):
            return None
        return cls(**{name: metadata[name] for name in names if name in metadata})

    def to_metadata(self) -> dict[str, str | int | bool]:
        """Return the metadata to write. Only shards mention shards."""
        return {name: value for name, value in asdict(self).items() if value != "" or name not in _OF_A_SHARD}


class StoredIndex(Protocol):
    """An open index. Several threads may query it."""

    name: str
    info: CollectionInfo

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best cosine first.

        A `topk` beyond the index's size returns all. Raises StoreUnavailable if it cannot answer now.
        """

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless queries of `embedder` are comparable with this index's vectors."""

    def check_content(self) -> bool:
        """Return whether the build recorded hashes. Raises StoreError unless the files match them."""

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages with these ids, as embedded but without prefix."""

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return the document ids that the index holds, whole or in chunks."""

    def close(self) -> None:
        """Release the files or connections."""


class Index(Protocol):
    """The location of an index that is not open yet."""

    setting: ClassVar[str]  # the config key of its location

    @property
    def name(self) -> str:
        """The name of its passages as a corpus."""

    @property
    def folder(self) -> Path | None:
        """The folder to copy, or None for a server."""

    def open(self) -> StoredIndex:
        """Open it. Raises StoreError if it is unusable, StoreNotReady if it may be usable later."""

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every passage. Raises StoreError."""

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]] | None:
        """Yield the same in a random order by `seed`, None if the index would have to be read as a whole."""


def back_end_of(folder: Path) -> Literal["chroma", "faiss"] | None:
    """Return the back end whose index a folder holds."""
    if (folder / DATABASE_FILE).is_file():
        return "chroma"
    return "faiss" if faiss_indices(folder) else None


def faiss_indices(folder: Path) -> list[Path]:
    """Return the FAISS indices in a folder: the one built here, else all `*.index` files."""
    built = folder / INDEX_FILE
    return [built] if built.is_file() else sorted(path for path in folder.glob("*.index") if path.is_file())


def passage_text(title: str, text: str) -> str:
    """Return the text to embed for a document, without the passage prefix."""
    return f"{title}\n{text}" if title else text


def check_records(index: str, info: CollectionInfo, embedder: Embedder) -> None:
    """Raise StoreError unless the index records this embedder's name, prefixes and dimension."""
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
    """Embed a stored passage again. Returns its cosine with the stored vector, of any length."""
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
    """The error for an index that was replaced while being served."""
    return StoreUnavailable(
        f"{index} is another version now ({now.version[:12]}, and {served.version[:12]} is served): restart "
        "the server to serve it"
    )
