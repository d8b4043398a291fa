"""The Chroma store: collections that know which embedder made them.

What was true at indexing (`CollectionInfo`) is the collection's metadata, written last: a collection without
it was not finished or not built by `search.index`. The user's texts are Chroma documents, their titles are
metadata, the vectors are unit vectors, the distance is cosine.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import chromadb
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.config import Settings

from search.embedders import Embedder, model_identity
from search.wire import ScoredPassage, make_passage

SCHEMA_VERSION = 1
DISTANCE: Literal["cosine"] = "cosine"
DATABASE_FILE = "chroma.sqlite3"
# The same text through the same weights differs by precision only (fp16 against fp32: about 1e-3).
SAME_VECTOR_COSINE = 0.99


class StoreError(Exception):
    """A Chroma folder or collection that cannot be used as asked, and what to do about it."""


@dataclass(frozen=True)
class CollectionInfo:
    """How a collection was built; `version` is a hash of its content."""

    embedder: str
    revision: str
    dimension: int
    query_prefix: str
    passage_prefix: str
    documents: int
    version: str
    distance: str = DISTANCE
    normalised: bool = True
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> "CollectionInfo | None":
        """Read a collection's metadata; None if it is not one of ours."""
        names = [field.name for field in fields(cls)]
        if metadata is None or any(name not in metadata for name in names):
            return None
        return cls(**{name: metadata[name] for name in names})

    def to_metadata(self) -> dict[str, str | int | bool]:
        """Return the metadata to write."""
        return asdict(self)


def passage_text(title: str, text: str) -> str:
    """Return what is embedded for a document, without the passage prefix."""
    return f"{title}\n{text}" if title else text


@contextmanager
def connect(path: Path, create: bool = False) -> Iterator[ClientAPI]:
    """Open the Chroma folder at `path`, release its files afterwards; raises StoreError without one."""
    if not create and not (path / DATABASE_FILE).is_file():
        raise StoreError(
            f"no Chroma folder at {path}: build one with `python -m search.index --chroma-path {path} …`"
        )
    settings = Settings(anonymized_telemetry=False)
    with cast(Client, chromadb.PersistentClient(str(path), settings=settings)) as client:
        yield client


def collection_names(client: ClientAPI) -> list[str]:
    """Return the names of a Chroma folder's collections, sorted."""
    return sorted(collection.name for collection in client.list_collections())


def get_collection(client: ClientAPI, path: Path, name: str) -> chromadb.Collection:
    """Return a collection, whoever built it; raises StoreError with the names that exist."""
    names = collection_names(client)
    if name not in names:
        raise StoreError(f"no collection {name!r} in {path}: it holds {', '.join(names) or 'none'}")
    return client.get_collection(name, embedding_function=None)


class Store:
    """An open collection that was built by `search.index`."""

    def __init__(self, collection: chromadb.Collection, info: CollectionInfo) -> None:
        self.collection = collection
        self.info = info

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless queries of `embedder` may be compared with this collection's vectors.

        Names, prefixes and dimension are compared first; then a stored document is embedded again and must
        give its stored vector, which also finds other weights under the same name.
        """
        if model_identity(embedder.name) != model_identity(self.info.embedder):
            self._refuse(embedder, "its model is", self.info.embedder, embedder.name)
        for what, stored, ours in (
            ("its query prefix is", self.info.query_prefix, embedder.prefixes.query),
            ("its passage prefix is", self.info.passage_prefix, embedder.prefixes.passage),
            ("its dimension is", self.info.dimension, embedder.dimension),
            ("its distance is", self.info.distance, DISTANCE),
            ("normalised vectors:", self.info.normalised, True),
        ):
            if stored != ours:
                self._refuse(embedder, what, stored, ours)
        sample = self.collection.peek(1)
        metadatas, documents, vectors = sample["metadatas"], sample["documents"], sample["embeddings"]
        assert metadatas and documents and vectors is not None  # a collection of ours is never empty
        again = embedder.encode_passages([passage_text(str(metadatas[0]["title"]), documents[0])])[0]
        cosine = float(np.dot(again, np.asarray(vectors[0], dtype=np.float32)))
        if cosine < SAME_VECTOR_COSINE:
            revisions = self.info.revision, embedder.revision
            self._refuse(
                embedder,
                f"the same text gets another vector (cosine {cosine:.3f}): its revision is",
                *revisions,
            )

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best first.

        The score is the cosine similarity, 1 - Chroma's cosine distance. A `topk` beyond the collection's
        size gives all.
        """
        found = self.collection.query(
            query_embeddings=np.asarray(embeddings, dtype=np.float32),
            n_results=min(topk, self.info.documents),
            include=["documents", "metadatas", "distances"],
        )
        documents, metadatas, distances = found["documents"], found["metadatas"], found["distances"]
        assert documents is not None and metadatas is not None and distances is not None  # asked for
        return [
            [
                {"document": make_passage(str(metadata["title"]), text), "score": 1.0 - distance}
                for text, metadata, distance in zip(*row, strict=True)
            ]
            for row in zip(documents, metadatas, distances, strict=True)
        ]

    def _refuse(self, embedder: Embedder, what: str, stored: object, ours: object) -> None:
        raise StoreError(
            f"collection {self.collection.name!r} was built with another embedder than {embedder.name!r}: "
            f"{what} {stored!r}, not {ours!r}. "
            f"Serve it with --embedder {self.info.embedder}, or index it again"
        )


@contextmanager
def open_collection(path: Path, name: str) -> Iterator[Store]:
    """Open a collection; raises StoreError if it or its folder is missing, or it was not built by us."""
    with connect(path) as client:
        collection = get_collection(client, path, name)
        info = CollectionInfo.from_metadata(collection.metadata)
        rebuild = f"build it anew: `python -m search.index --source {path} --source-collection {name} …`"
        if info is None:
            raise StoreError(
                f"collection {name!r} in {path} was not built by search.index (no metadata): {rebuild}"
            )
        if info.schema_version != SCHEMA_VERSION:
            raise StoreError(
                f"collection {name!r} in {path} has schema {info.schema_version}, not {SCHEMA_VERSION}: "
                f"{rebuild}"
            )
        yield Store(collection, info)


def iter_documents(chroma_path: Path, collection: str, batch: int = 1000) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of every document, sorted by id, of any collection, whoever built it.

    Memory is bounded by the ids and one batch of texts. A missing title or text is the empty string.
    """
    with connect(chroma_path) as client:
        handle = get_collection(client, chroma_path, collection)
        ids = sorted(handle.get(include=[])["ids"])
        for start in range(0, len(ids), batch):
            wanted = ids[start : start + batch]
            page = handle.get(ids=wanted, include=["documents", "metadatas"])
            rows = zip(page["ids"], page["metadatas"] or [], page["documents"] or [], strict=True)
            by_id = {key: (metadata, text) for key, metadata, text in rows}
            for key in wanted:
                metadata, text = by_id[key]
                yield key, str((metadata or {}).get("title") or ""), text or ""
