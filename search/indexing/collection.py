"""The Chroma collection that an index build writes: its existing state, and how it is updated.

A folder is written to a work folder and renamed into place (`write_folder`); a server's collection is written
in place (`write_server`) and marked as being written until it is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import ChromaError
from tqdm import tqdm

from ops.files import publish
from search.embedders import Embedder, model_identity
from search.indexing.journal import IndexJournal, Row, Survey
from search.place import DATABASE_FILE, ChromaPlace, StoreError, connect
from search.store import BEING_WRITTEN, HNSW, SCHEMA_VERSION, CollectionInfo, collection_names

# Records per call. Chroma Cloud accepts and returns at most 300; a folder accepts 5,461.
SERVER_PAGE = 300
FOLDER_PAGE = 1000

Embedded = Iterator[tuple[list[Row], np.ndarray]]
"""Chunks with their vectors (n, dimension), a unit at a time."""


@dataclass(frozen=True)
class IndexSettings:
    """What the chunks and vectors of a collection depend on, apart from its documents."""

    embedder: str
    revision: str
    chunk_tokens: int
    chunk_overlap: int
    schema_version: int = SCHEMA_VERSION

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the same name for a model wherever it is stored."""
        return {**asdict(self), "embedder": model_identity(self.embedder)}

    def match(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a collection with this metadata was built, or is being built, with these settings."""
        if any(name not in metadata for name in asdict(self)):
            return False
        theirs = IndexSettings(**{name: metadata[name] for name in asdict(self)})
        return theirs.identity() == self.identity()

    def version(self, surveyed: Survey) -> str:
        """Return the version of a collection of these documents, split with these sizes (64 hex digits)."""
        content = [surveyed.version, self.chunk_tokens, self.chunk_overlap, self.schema_version]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class Collection:
    """A collection by name in a Chroma; it need not exist yet."""

    place: ChromaPlace
    name: str

    def __str__(self) -> str:
        return f"collection {self.name!r} in {self.place}"

    def metadata(self) -> Mapping[str, Any] | None:
        """Return the existing collection's metadata, None without one; raises StoreError for no Chroma."""
        folder = self.place.folder
        if folder is not None and not (folder / DATABASE_FILE).is_file():
            if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
                return None
            raise StoreError(f"{folder} exists and is not a Chroma folder: choose another --chroma-path")
        with connect(self.place) as client:
            if self.name not in collection_names(client):
                return None
            return client.get_collection(self.name, embedding_function=None).metadata or {}

    def chunks(self) -> Iterator[tuple[str, str, str | None, int]]:
        """Yield of each existing chunk: id, document, the document's digest and its number of chunks."""
        page_size = FOLDER_PAGE if self.place.folder else SERVER_PAGE
        with connect(self.place) as client:
            handle = client.get_collection(self.name, embedding_function=None)
            offset = 0
            while ids := (page := handle.get(include=["metadatas"], limit=page_size, offset=offset))["ids"]:
                for key, stored in zip(ids, page["metadatas"] or [], strict=True):
                    metadata: Mapping[str, Any] = stored or {}
                    parts = str(metadata.get("chunk", "1/1")).rpartition("/")[2]
                    yield key, str(metadata.get("doc_id", key)), metadata.get("doc_digest"), int(parts)
                offset += len(ids)


@dataclass(frozen=True)
class Contents:
    """The new contents of a collection: the journal knows what to delete and what to add."""

    journal: IndexJournal
    settings: IndexSettings
    surveyed: Survey
    chunks: int
    update: bool
    """Whether the existing collection is updated; else it is written from scratch."""

    @property
    def version(self) -> str:
        """The new version."""
        return self.settings.version(self.surveyed)

    def info(self, encoder: Embedder) -> CollectionInfo:
        """Return the final metadata."""
        return CollectionInfo(
            embedder=encoder.name,
            revision=encoder.revision,
            dimension=encoder.dimension,
            query_prefix=encoder.prefixes.query,
            passage_prefix=encoder.prefixes.passage,
            documents=self.surveyed.documents,
            chunks=self.chunks,
            chunk_tokens=self.settings.chunk_tokens,
            chunk_overlap=self.settings.chunk_overlap,
            version=self.version,
        )


def write_folder(
    target: Collection, contents: Contents, info: CollectionInfo, units: int, work: Path
) -> None:
    """Write the collection to `work` from the journal's vectors, and rename it to the target's folder."""
    folder = target.place.folder
    assert folder is not None
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed here
    if (folder / DATABASE_FILE).is_file():
        with connect(folder) as client:
            others = set(collection_names(client)) - {target.name}
        if contents.update or others:
            shutil.copytree(folder, work)
    journal = contents.journal
    stored = (journal.embedded(unit) for unit in range(units))
    embedded = with_progress(stored, "writing", journal.chunk_count())
    with connect(work, create=True) as client:
        handle = _prepared(client, target, contents, None)
        _write(handle, FOLDER_PAGE, contents, embedded, target)
        handle.modify(metadata=info.to_metadata())
    publish(work, folder)


def write_server(target: Collection, contents: Contents, info: CollectionInfo, embedded: Embedded) -> None:
    """Write the collection in place, each unit as soon as it is embedded; its info last."""
    with connect(target.place, create=True) as client:
        mark = {**asdict(contents.settings), BEING_WRITTEN: contents.version}
        handle = _prepared(client, target, contents, mark)
        handle.modify(metadata=mark)  # for a collection that existed before
        _write(handle, SERVER_PAGE, contents, embedded, target)
        handle.modify(metadata=info.to_metadata())


def _prepared(
    client: ClientAPI, target: Collection, contents: Contents, metadata: dict[str, Any] | None
) -> chromadb.Collection:
    """Return the collection to write to: the existing one for an update, else an empty one."""
    if not contents.update and target.name in collection_names(client):
        client.delete_collection(target.name)
    try:
        return client.get_or_create_collection(
            target.name, configuration={"hnsw": HNSW}, metadata=metadata, embedding_function=None
        )
    except ChromaError as error:  # a name that Chroma does not allow
        raise StoreError(f"collection {target.name!r} cannot be created: {error}") from error


def _write(
    handle: chromadb.Collection, page: int, contents: Contents, embedded: Embedded, target: Collection
) -> None:
    stale = contents.journal.stale_chunks()
    while some := list(islice(stale, page)):
        handle.delete(ids=some)
    for rows, vectors in embedded:
        for start in range(0, len(rows), page):
            some_rows = rows[start : start + page]
            handle.upsert(
                ids=[row.id for row in some_rows],
                embeddings=vectors[start : start + page],
                documents=[row.text for row in some_rows],
                metadatas=[row.metadata() for row in some_rows],
            )
    if (written := handle.count()) != contents.chunks:
        raise StoreError(
            f"{target} holds {written} chunks and should hold {contents.chunks}: two documents have the same "
            "chunk ids, or another process writes to it"
        )


def with_progress(embedded: Embedded, what: str, total: int) -> Embedded:
    """Yield `embedded` as it is, and show a progress bar with rate and remaining time."""
    with tqdm(total=total, desc=what, unit=" chunks", mininterval=1.0, delay=1.0) as progress:
        for rows, vectors in embedded:
            yield rows, vectors
            progress.update(len(rows))
