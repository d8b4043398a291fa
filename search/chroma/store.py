"""The Chroma store: collections that record which embedder built them (`CollectionInfo`, written last).

A `Store` refuses another version until a restart: the server's checks and cache are about the first.
"""

import hashlib
import os
import random
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.collection_configuration import HNSWConfiguration
from chromadb.errors import NotFoundError, RateLimitError

from search.chroma.content import check_content, check_files
from search.chroma.location import ChromaPlace, Quota, connect, no_chroma, other_shards, plain, shard_counts
from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.stored_index import (
    DATABASE_FILE,
    DISTANCE,
    SAME_VECTOR_COSINE,
    SCHEMA_VERSION,
    CollectionInfo,
    another_version,
    check_records,
    cosine_again,
    other_embedder,
    passage_text,
)
from search.wire import ScoredPassage, make_passage

BEING_WRITTEN = "being_written"  # In a server's collection while it is indexed, in place of `CollectionInfo`
# Cosine similarity lost per unit of Chroma's distance. Adopted collections keep their own distance.
_COSINE_LOSS = {DISTANCE: 1.0, "ip": 1.0, "l2": 0.5}
# Parameters of new collections (bench/README.md, HNSW parameters).
HNSW: HNSWConfiguration = {
    "space": DISTANCE,
    # Neighbours linked to a vector. Chroma's own 16 need twice as many candidates for the same recall.
    "max_neighbors": 32,
    # Candidates per inserted vector, paid once: 76 s for 100,000 vectors on two cores.
    "ef_construction": 200,
    # Candidates per query: Chroma's own 100 lose one passage in ninety there.
    "ef_search": 200,
}
# Vectors after which Chroma writes its vector files again. Each opening inserts later ones into the graph.
SYNC_THRESHOLD = 1000
# Writes of the vector files per build (bench/README.md, Writing an index). Chroma's own: chunks / 1,000.
SYNCS = 8
DRAW = "draw"  # metadata key of a number by the hash of the record's id, for drawing samples
DRAWS = 2**16  # How many such numbers there are: 320 of 21 million records share one, two pages from a server
_DRAWN_TOGETHER = 2000  # Most numbers per call: SQLite limits a query's variables
_DRAWN_IDS = 5000  # Ids drawn at a time: each query by metadata scans the collection, some 0.2 µs a record


def sync_threshold(vectors: int) -> int:
    """Return Chroma's `sync_threshold` for writing this many vectors."""
    return max(SYNC_THRESHOLD, -(-vectors // SYNCS))


def set_sync_threshold(collection: chromadb.Collection, threshold: int) -> None:
    """Change a collection's threshold, from its next opening on. Chroma Cloud's collections have none."""
    if collection.configuration.get("hnsw"):
        collection.modify(configuration={"hnsw": {"sync_threshold": threshold}})


def collection_names(client: ClientAPI) -> list[str]:
    """Return the names of a Chroma's collections, sorted."""
    names: list[str] = []
    while page := client.list_collections(limit=Quota.page, offset=len(names)):
        names += [collection.name for collection in page]
    return sorted(names)


def get_collection(client: ClientAPI, place: ChromaPlace | Path | str, name: str) -> chromadb.Collection:
    """Return a collection, of any tool. Raises StoreError with the existing names."""
    try:
        return client.get_collection(name, embedding_function=None)
    except NotFoundError:
        names = collection_names(client)
        if found := shard_counts(names, name):
            raise other_shards(f"{name!r} in {place}", min(found), 1) from None
        holds = ", ".join(names) or "none"
        raise StoreError(f"no collection {name!r} in {place}: it holds {holds}") from None


def iter_documents(place: ChromaPlace | Path | str, collection: str) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of any collection's documents (or chunks), sorted by id, in bounded memory."""
    place = ChromaPlace.parse(place)
    # The empty name is a temporary database, which SQLite moves to disk as it grows.
    with connect(place) as client, closing(sqlite3.connect("")) as database:
        handle = get_collection(client, place, collection)
        database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        offset = 0
        while some := handle.get(include=[], limit=place.page, offset=offset)["ids"]:
            database.executemany("INSERT INTO ids VALUES (?)", ((key,) for key in some))
            offset += len(some)
        ids = ((key, 0) for (key,) in database.execute("SELECT id FROM ids ORDER BY id"))
        yield from _documents([handle], ids, place.page)


def _documents(
    handles: Sequence[chromadb.Collection], records: Iterator[tuple[str, int]], batch: int
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of records in their order. A record is its id and its collection's index."""
    while wanted := list(islice(records, batch)):
        found: dict[str, tuple[Mapping[str, Any] | None, str | None]] = {}
        for number in {number for _, number in wanted}:
            ids = [key for key, its_number in wanted if its_number == number]
            page = handles[number].get(ids=ids, include=["documents", "metadatas"])
            rows = zip(page["ids"], page["metadatas"] or [], page["documents"] or [], strict=True)
            found |= {key: (metadata, text) for key, metadata, text in rows}
            if lost := set(ids) - found.keys():
                raise StoreNotReady(
                    f"collection {handles[number].name!r} is damaged: it lacks {min(lost)!r}. Build it again"
                )
        for key, _ in wanted:
            metadata, text = found[key]
            yield key, _title(metadata), text or ""


def draw_of(key: str) -> int:
    """Return the number below `DRAWS` by which the record with this id is drawn."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:2])


def draw_from(collections: Sequence[tuple[ChromaPlace, str]], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of collections with draws, in the random order of a single collection."""
    rng = random.Random(f"{seed}/draws")
    draws = rng.sample(range(DRAWS), DRAWS)
    pages = [2 * _DRAWN_IDS if place.folder else place.quota.page for place, _ in collections]
    with ExitStack() as stack:
        handles = [
            get_collection(stack.enter_context(connect(place)), place, name) for place, name in collections
        ]
        records = sum(handle.count() for handle in handles)
        together = min(max(DRAWS * _DRAWN_IDS // max(records, 1), 1), _DRAWN_TOGETHER)
        for start in range(0, DRAWS, together):
            some = draws[start : start + together]
            found = sorted(
                (key, number)
                for number, handle in enumerate(handles)
                for key in _with_draws(handle, some, pages[number])
            )
            rng.shuffle(found)
            yield from _documents(handles, iter(found), min(place.page for place, _ in collections))


def _with_draws(handle: chromadb.Collection, draws: list[int], page: int) -> list[str]:
    found: list[str] = []
    asked: Any = {DRAW: {"$in": draws}}
    while True:
        some = handle.get(where=asked, limit=page, offset=len(found), include=[])["ids"]
        found += some
        if len(some) < page:
            return found


def open_collection(place: ChromaPlace | Path | str, name: str) -> "closing[Store]":
    """Open a collection, also a shard. Raises StoreError if it is missing, or of another tool."""
    return closing(Store(ChromaPlace.parse(place), name))


class Store:
    """An open collection that `search.index` built. Several threads may query it."""

    def __init__(self, place: ChromaPlace, name: str) -> None:
        self.place = place
        self.name = name
        self._lock = threading.Lock()
        self._opened: _OpenCollection | None = _OpenCollection(place, name)
        self.collection = self._opened.collection
        self.info = self._opened.info

    def close(self) -> None:
        """Release the files or connections."""
        with self._lock:
            self._drop()

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless `embedder` has the recorded properties and reproduces a stored vector."""
        info, this = self.info, f"collection {self.collection.name!r}"
        check_records(this, info, embedder)
        if info.distance not in _COSINE_LOSS:
            raise other_embedder(this, info, embedder, "its distance is", info.distance, DISTANCE)
        try:
            sample = self.collection.peek(1)
        except Exception as error:  # as in query
            raise StoreNotReady(f"the index at {self.place} failed: {plain(error)}") from error
        metadatas, documents, vectors = sample["metadatas"], sample["documents"], sample["embeddings"]
        if not metadatas or not documents or vectors is None or documents[0] is None:
            raise StoreError(f"collection {self.name!r} in {self.place} lost its documents: rebuild it")
        cosine = cosine_again(embedder, passage_text(_title(metadatas[0]), documents[0]), vectors[0])
        if cosine < SAME_VECTOR_COSINE:
            what = f"the same text gets another vector (cosine {cosine:.3f}): its revision is"
            raise other_embedder(this, info, embedder, what, info.revision, embedder.revision)

    def check_content(self) -> bool:
        """Return whether a folder's hashes were recorded. Raises StoreError unless they match."""
        return self.place.folder is None or check_content(self.place.folder, self.name)

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages with these ids, as embedded but without prefix."""
        found = self.collection.get(ids=list(ids), include=["documents", "metadatas"])
        rows = zip(found["ids"], found["documents"] or [], found["metadatas"] or [], strict=True)
        return {key: passage_text(_title(metadata), text or "") for key, text, metadata in rows}

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return the document ids that the collection holds, whole or in chunks."""
        there = set(self.collection.get(ids=list(names), include=[])["ids"])
        if others := [name for name in names if name not in there]:
            of_them: Any = {"doc_id": {"$in": others}}
            chunks = self.collection.get(where=of_them, include=["metadatas"])
            there |= {str(metadata["doc_id"]) for metadata in chunks["metadatas"] or []}
        return there

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), as `StoredIndex.query`."""
        vectors = np.asarray(embeddings, dtype=np.float32)
        wanted = min(topk, self.info.chunks)
        # Repeat once if the collection is no longer the object that was opened.
        for _ in range(2):
            with self._lock:
                opened = self._ready()
            try:
                with self.place.quota.reading(self.place.text):
                    found = opened.collection.query(
                        query_embeddings=vectors,
                        n_results=wanted,
                        include=["documents", "metadatas", "distances"],
                    )
                # Writers mark a collection first, so an unmarked one did not change during the query.
                if opened.is_unchanged():
                    return _passages(found, wanted, _COSINE_LOSS[self.info.distance])
                self._forget(opened)
            except NotFoundError:  # the server no longer has a collection with this id
                self._forget(opened)
            except Exception as error:  # Chroma's, httpx's, and bare ones where Chroma knows no better
                cause = error.__context__
                status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else 0
                # At a rate limit, reconnecting would only add calls.
                if status != 429 and not isinstance(error, RateLimitError):
                    self._forget(opened)
                raise StoreUnavailable(f"the index at {self.place} failed: {plain(error)}") from error
        raise StoreUnavailable(f"collection {self.name!r} in {self.place} is being replaced")

    def _ready(self) -> "_OpenCollection":
        """Return the open collection, reopened if necessary. Hold the lock."""
        if self._opened is not None and self._opened.is_stale():
            self._drop()
        if self._opened is None:
            try:
                opened = _OpenCollection(self.place, self.name)
            except StoreError as error:
                raise StoreUnavailable(str(error)) from error
            except Exception as error:  # as in query
                what = f"the index at {self.place} cannot be opened"
                raise StoreUnavailable(f"{what}: {plain(error)}") from error
            if opened.info != self.info:
                opened.release()
                raise another_version(f"collection {self.name!r} in {self.place}", opened.info, self.info)
            self._opened = opened
            self.collection = opened.collection
        try:
            self._opened.load()
        except StoreUnavailable:
            self._drop()
            raise
        return self._opened

    def _forget(self, opened: "_OpenCollection") -> None:
        with self._lock:
            if self._opened is opened:
                self._drop()

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()


class _OpenCollection:
    """One opening of a collection. A replaced folder has another inode. Every opening changes its time.

    Never call Chroma while a folder is missing: it would create an empty one.
    """

    def __init__(self, place: ChromaPlace, name: str) -> None:
        self._place = place
        self._name = name
        self._loaded = False
        with ExitStack() as stack:
            # Before opening, so that the first query sees a change in between.
            self._stamp = self._stat() if place.folder else None
            self._client = stack.enter_context(connect(place))
            self.collection = get_collection(self._client, place, name)
            metadata = self.collection.metadata or {}
            schema = metadata.get("schema_version", SCHEMA_VERSION)
            info = CollectionInfo.from_metadata(metadata)
            this = f"collection {name!r} in {place}"
            prepare = "`drzero prepare-data"
            rebuild = f"rebuild it: {prepare} source={place} source_collection={name} replace=true`"
            if BEING_WRITTEN in metadata:
                raise StoreError(
                    f"{this} is being indexed, or its indexing was interrupted: wait for it, or run it again"
                )
            if schema != SCHEMA_VERSION:
                raise StoreError(f"{this} has schema {schema}, not {SCHEMA_VERSION}: {rebuild}")
            if info is None:
                adopt = f"{prepare}` adopts it if its vectors are those of retrieval.embedder; else {rebuild}"
                raise StoreError(f"{this} was not built by search.index (no metadata): {adopt}")
            self.info = info
            self.release = stack.pop_all().close

    def load(self) -> None:
        """Have Chroma read a folder's vectors. Raises StoreUnavailable if it cannot."""
        if self._place.folder is None or self._loaded:
            return
        try:
            self.collection.get(limit=1, include=["embeddings"])
        except Exception as error:  # as in Store.query
            raise StoreUnavailable(f"the index at {self._place} cannot be read: {plain(error)}") from error
        self._loaded = True

    def is_stale(self) -> bool:
        """Whether a folder must be opened again. Raises StoreUnavailable while it is missing."""
        if self._place.folder is None:
            return False
        try:
            now = self._stat()
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        if now == self._stamp:
            return False
        if self._stamp is None or now[:2] != self._stamp[:2]:
            return True
        with suppress(Exception):  # of any kind: opening again reports the fault
            check_files(self._place.folder)
            if self._is_same():
                self._stamp = now
                return False
        return True

    def is_unchanged(self) -> bool:
        try:
            if self._place.folder is None:
                return self._is_same()
            return self._stamp is not None and self._stat()[:2] == self._stamp[:2]
        except (NotFoundError, StoreError):
            return False

    def _is_same(self) -> bool:
        handle = self._client.get_collection(self._name, embedding_function=None)
        return handle.id == self.collection.id and CollectionInfo.from_metadata(handle.metadata) == self.info

    def _stat(self) -> tuple[int, int, int, int]:
        assert self._place.folder is not None
        try:
            found = os.stat(self._place.folder / DATABASE_FILE)
        except OSError as error:
            raise no_chroma(self._place.folder) from error
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _title(metadata: Mapping[str, Any] | None) -> str:
    return str((metadata or {}).get("title") or "")


def _passages(found: Any, wanted: int, loss: float) -> list[list[ScoredPassage]]:
    rows = zip(*(found[name] for name in ("ids", "documents", "metadatas", "distances")), strict=True)
    answers: list[list[ScoredPassage]] = [
        [
            {"document": make_passage(key, _title(metadata), text), "score": 1.0 - loss * distance}
            for key, text, metadata, distance in zip(*row, strict=True)
        ]
        for row in rows
    ]
    if short := [len(answer) for answer in answers if len(answer) != wanted]:
        raise ValueError(f"it returned {short[0]} of {wanted} passages")
    return answers
