"""The Chroma collection that an index build writes: its existing state, and its update."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from drzero.ops.files import publish
from search.chroma.content import check_content, record_content
from search.chroma.location import ChromaPlace, connect, other_shards, shard_counts, shards_in
from search.chroma.store import (
    BEING_WRITTEN,
    DRAW,
    DRAWS,
    HNSW,
    SYNC_THRESHOLD,
    collection_names,
    draw_of,
    set_sync_threshold,
    sync_threshold,
)
from search.embedders import model_identity
from search.errors import StoreError
from search.indexing.journal import IndexJournal, JournalRow
from search.indexing.progress import progress
from search.indexing.size import IndexSize
from search.stored_index import DATABASE_FILE, CollectionInfo

SETTINGS = (
    *("embedder", "revision", "query_prefix", "passage_prefix"),
    *("chunk_tokens", "chunk_overlap", "schema_version"),
)
"""Metadata that chunks and vectors depend on, besides the documents."""

Embedded = Iterator[tuple[list[JournalRow], np.ndarray]]  # chunks and vectors (n, dimension), by unit


def settings_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a collection's metadata, empty for another tool's."""
    if any(name not in metadata for name in SETTINGS):
        return {}
    return {name: metadata[name] for name in SETTINGS} | {"embedder": model_identity(metadata["embedder"])}


@dataclass(frozen=True)
class Collection:
    """A collection by name in a Chroma, which need not exist yet (`shard`, `whole`: see `CollectionInfo`)."""

    draws: ClassVar[int] = DRAWS  # the `CollectionInfo.draws` of a new one
    place: ChromaPlace
    name: str
    shard: str = ""
    whole: str = ""

    def __str__(self) -> str:
        return f"collection {self.name!r} in {self.place}"

    @property
    def folder(self) -> Path | None:
        """The Chroma folder, None for a server."""
        return self.place.folder

    def size(self, chunks: int, dimension: int, text_bytes: int) -> IndexSize:
        """Return the size of a collection with this content."""
        return IndexSize(chunks, dimension, text_bytes)

    def is_as_asked(self) -> bool:
        """Whether the existing collection belongs to the same whole."""
        return (self.metadata() or {}).get("whole", "") == self.whole

    def check_content(self) -> None:
        """Raise StoreError if a folder's collection is damaged. Adds missing hashes."""
        folder = self.place.folder
        if folder is not None and not check_content(folder, self.name):
            record_content(folder, self.name)

    def metadata(self) -> Mapping[str, Any] | None:
        """Return the existing collection's metadata, None without one. Raises StoreError for no Chroma."""
        folder = self.place.folder
        if folder is not None and not (folder / DATABASE_FILE).is_file():
            if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
                return None
            if found := shards_in(folder):
                raise other_shards(folder, min(found), 1)
            raise StoreError(f"{folder} exists and is not a Chroma folder: choose another --chroma-path")
        with connect(self.place) as client:
            names = collection_names(client)
            if found := shard_counts(names, self.name):
                raise other_shards(f"{self.name!r} in {self.place}", min(found), 1)
            if self.name not in names:
                return None
            return client.get_collection(self.name, embedding_function=None).metadata or {}

    def chunks(self) -> Iterator[tuple[str, str, str | None, int]]:
        """Yield each existing chunk's id, document, document digest and number of chunks."""
        with connect(self.place) as client:
            handle = client.get_collection(self.name, embedding_function=None)
            offset = 0
            while (page := handle.get(include=["metadatas"], limit=self.place.page, offset=offset))["ids"]:
                for key, stored in zip(page["ids"], page["metadatas"] or [], strict=True):
                    metadata: Mapping[str, Any] = stored or {}
                    parts = str(metadata.get("chunk", "1/1")).rpartition("/")[2]
                    yield key, str(metadata.get("doc_id", key)), metadata.get("doc_digest"), int(parts)
                offset += len(page["ids"])

    def write_folder(
        self, journal: IndexJournal, info: CollectionInfo, update: bool, units: int, work: Path
    ) -> None:
        """Write the collection (or an `update`) to `work` from the journal, and rename it into place."""
        folder = self.place.folder
        assert folder is not None
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed here
        if (folder / DATABASE_FILE).is_file():
            with connect(folder) as client:
                others = set(collection_names(client)) - {self.name}
            if update or others:
                shutil.copytree(folder, work)
        stored = (journal.embedded(unit) for unit in range(units))
        embedded = with_progress(stored, "writing", journal.chunk_count())
        write(self, ChromaPlace.parse(work), journal, info, update, embedded)
        # Opening it again writes the vectors below the threshold, which each service would otherwise insert.
        with connect(work) as client:
            client.get_collection(self.name, embedding_function=None).get(limit=1, include=["embeddings"])
        record_content(work, self.name)
        publish(work, folder)


def write(
    target: Collection,
    place: ChromaPlace,
    journal: IndexJournal,
    info: CollectionInfo,
    update: bool,
    embedded: Embedded,
) -> None:
    """Write the collection to `place`, each unit once it is embedded, and its info last."""
    info = replace(info, shard=target.shard, whole=target.whole)
    threshold = sync_threshold(journal.chunk_count())
    kept = (*SETTINGS, "draws")
    mark = {name: getattr(info, name) for name in kept} | {BEING_WRITTEN: info.version}
    if target.whole:
        mark |= {"shard": target.shard, "whole": target.whole}
    with connect(place, create=True) as client:
        if not update and target.name in collection_names(client):
            client.delete_collection(target.name)
        handle = client.get_or_create_collection(
            target.name,
            configuration={"hnsw": HNSW | {"sync_threshold": threshold}},
            metadata=mark,
            embedding_function=None,
        )
        # The collection may have existed before.
        handle.modify(metadata=mark)
        set_sync_threshold(handle, threshold)
        stale = journal.stale_chunks()
        while some := list(islice(stale, place.page)):
            handle.delete(ids=some)
        for rows, vectors in embedded:
            for start in range(0, len(rows), place.page):
                some_rows = rows[start : start + place.page]
                handle.upsert(
                    ids=[row.id for row in some_rows],
                    embeddings=vectors[start : start + place.page],
                    documents=[row.text for row in some_rows],
                    metadatas=[row.metadata() | {DRAW: draw_of(row.id)} for row in some_rows],
                )
        if (written := handle.count()) != info.chunks:
            raise StoreError(
                f"{target} holds {written} chunks and should hold {info.chunks}: two documents have the same "
                "chunk ids, or another process writes to it"
            )
        set_sync_threshold(handle, SYNC_THRESHOLD)
        handle.modify(metadata=info.to_metadata())


def with_progress(embedded: Embedded, what: str, total: int) -> Embedded:
    """Yield `embedded`, and show how much of it is done."""
    with progress(what, "chunks", total) as bar:
        for rows, vectors in embedded:
            yield rows, vectors
            bar.update(len(rows))
