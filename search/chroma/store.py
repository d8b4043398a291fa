"""The Chroma store: collections that record which embedder built them.

    with open_collection("outputs/corpus/chromadb", "corpus") as store:
        store.query(embeddings, topk=3)

The state at indexing (`CollectionInfo`) is the collection's metadata, written last: a collection without it
was not finished or not built by `search.index`. The user's texts are Chroma documents, their titles are
metadata, the vectors are unit vectors, the distance is cosine.

An open `Store` answers from the collection that was opened, or not at all (`StoreUnavailable`): after each
query it checks that this collection still exists unchanged, and it recovers by itself when the collection is
back. A collection replaced by another version is refused until the process is restarted, because the server's
checks, its cache and the run's records are about the version it was started with.
"""

import hashlib
import os
import random
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.collection_configuration import HNSWConfiguration
from chromadb.errors import NotFoundError, RateLimitError

from search.chroma.content import check_content
from search.chroma.location import (
    DATABASE_FILE,
    ChromaPlace,
    check_files,
    connect,
    no_chroma,
    other_shards,
    plain,
    shard_counts,
)
from search.chroma.quota import Quota
from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.stored_index import (
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

BEING_WRITTEN = "being_written"
"""In the metadata of a server's collection while it is indexed, in place of `CollectionInfo`."""
# What a unit of Chroma's distance between unit vectors takes from the cosine similarity, by distance: an
# adopted collection keeps its own.
_COSINE_LOSS = {DISTANCE: 1.0, "ip": 1.0, "l2": 0.5}
# The parameters of new collections, measured by bench/hnsw.py.
HNSW: HNSWConfiguration = {
    "space": DISTANCE,
    # Neighbours that a vector is linked to: with Chroma's own 16 recall stays at 0.993 and below unless twice
    # as many candidates are inspected, which costs more.
    "max_neighbors": 32,
    # Candidates inspected when a vector is inserted, paid once: 76 s for 100,000 vectors on two cores.
    "ef_construction": 200,
    # Candidates inspected per query: Chroma's own 100 loses one passage in ninety there.
    "ef_search": 200,
}
# Vectors after which Chroma writes all of its vector files again. Of a finished collection Chroma's own: what
# came after the last write waits in SQLite, and each opening inserts it into the graph.
SYNC_THRESHOLD = 1000
# While a collection is written, its vector files are written so many times in all, measured by
# bench/index_writes.py: with Chroma's own threshold it would be chunks / 1,000 times.
SYNCS = 8
DRAW = "draw"
"""In each record's metadata, a number by the hash of its id: what a sample is drawn by."""
DRAWS = 2**16
"""How many such numbers there are: of 21 million records 320 have the same, two answers of a server."""
_DRAWN_TOGETHER = 2000
"""Numbers that are asked for in one call at most: SQLite limits the variables of a query."""
_DRAWN_IDS = 5000
"""Ids that are drawn at a time: for each question by metadata Chroma looks at every record of a collection,
some 0.2 µs each, so a few large questions are better than many small ones."""


def sync_threshold(vectors: int) -> int:
    """Return Chroma's `sync_threshold` while so many vectors are written."""
    return max(SYNC_THRESHOLD, -(-vectors // SYNCS))


def set_sync_threshold(collection: chromadb.Collection, threshold: int) -> None:
    """Change the threshold of a collection, for when its vectors are next opened.

    Chroma Cloud's collections have another kind of graph, and no threshold.
    """
    if collection.configuration.get("hnsw"):
        collection.modify(configuration={"hnsw": {"sync_threshold": threshold}})


def collection_names(client: ClientAPI) -> list[str]:
    """Return the names of a Chroma's collections, sorted."""
    names: list[str] = []
    while page := client.list_collections(limit=Quota.page, offset=len(names)):
        names += [collection.name for collection in page]
    return sorted(names)


def get_collection(client: ClientAPI, place: ChromaPlace | Path | str, name: str) -> chromadb.Collection:
    """Return a collection, also of another tool; raises StoreError with the names that exist."""
    try:
        return client.get_collection(name, embedding_function=None)
    except NotFoundError:
        names = collection_names(client)
        if found := shard_counts(names, name):
            raise other_shards(f"{name!r} in {place}", min(found), 1) from None
        holds = ", ".join(names) or "none"
        raise StoreError(f"no collection {name!r} in {place}: it holds {holds}") from None


def iter_documents(
    place: ChromaPlace | Path | str, collection: str, batch: int = 1000
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of every document of any collection, sorted by id.

    For a collection that `search.index` built these are its chunks, with the chunks' ids. Memory is bounded:
    ids are sorted on disk, and one batch of texts is read at a time. A missing title or text is the empty
    string.
    """
    place = ChromaPlace.parse(place)
    batch = batch if place.folder else min(batch, place.quota.page)
    # The empty name is a temporary database, which SQLite moves to disk once it outgrows a cache of some MiB.
    with connect(place) as client, closing(sqlite3.connect("")) as database:
        handle = get_collection(client, place, collection)
        database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        offset = 0
        while some := handle.get(include=[], limit=batch, offset=offset)["ids"]:
            database.executemany("INSERT INTO ids VALUES (?)", ((key,) for key in some))
            offset += len(some)
        ids = ((key, 0) for (key,) in database.execute("SELECT id FROM ids ORDER BY id"))
        yield from _documents([handle], ids, batch)


def _documents(
    handles: Sequence[chromadb.Collection], records: Iterator[tuple[str, int]], batch: int
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of records in their order, read in batches: id, and which collection has it."""
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
    """Return the number below `DRAWS` by which the record of this id is drawn."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:2])


def draw_documents(
    place: ChromaPlace | Path | str, collection: str, seed: int
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of every document of a collection with draws, in an order random by `seed`.

    The ids of a few draws are asked for at a time, then their texts as they are needed: the first documents
    cost little in a collection of any size. As ids are hashed, any of them is as likely as another to be
    among the first. The order is the same in a folder and on a server.
    """
    return draw_from([(ChromaPlace.parse(place), collection)], seed)


def draw_from(collections: Sequence[tuple[ChromaPlace, str]], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield the documents of several collections, in the order that one with all of them would give."""
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
            yield from _documents(handles, iter(found), min(place.quota.page for place, _ in collections))


def _with_draws(handle: chromadb.Collection, draws: list[int], page: int) -> list[str]:
    """The ids of the records that have these draws."""
    found: list[str] = []
    asked: Any = {DRAW: {"$in": draws}}
    is_last = False
    while not is_last:
        some = handle.get(where=asked, limit=page, offset=len(found), include=[])["ids"]
        found += some
        is_last = len(some) < page
    return found


@dataclass(frozen=True)
class ChromaIndex:
    """Where a collection is, before it is opened."""

    path: ChromaPlace | Path | str
    collection: str

    @property
    def setting(self) -> str:
        """The config key that says where it is."""
        return "chroma.path"

    @property
    def name(self) -> str:
        """The collection's."""
        return self.collection

    @property
    def folder(self) -> Path | None:
        """The Chroma folder; None of a server."""
        return ChromaPlace.parse(self.path).folder

    def __str__(self) -> str:
        return f"collection {self.collection!r} in {self.path}"

    def open(self) -> "Store":
        """Open it; raises StoreError if it or its Chroma is missing, it was not built by us or is a shard."""
        store = Store(ChromaPlace.parse(self.path), self.collection)
        if shard := store.info.shard:
            store.close()
            raise StoreError(
                f"{self} is shard {shard} of an index, and answers for a part of it: open the whole "
                f"(chroma.shards={shard.rpartition('/')[2]}, and chroma.path as it was built)"
            )
        return store

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every document, sorted by id; raises StoreError."""
        return iter_documents(self.path, self.collection)

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]] | None:
        """Yield the documents in an order random by `seed`; None of a collection without draws."""
        with open_collection(self.path, self.collection) as store:
            has_draws = store.info.draws == DRAWS
        return draw_documents(self.path, self.collection, seed) if has_draws else None


def open_collection(place: ChromaPlace | Path | str, name: str) -> "closing[Store]":
    """Open a collection; raises StoreError if it or its Chroma is missing, or it was not built by us."""
    return closing(Store(ChromaPlace.parse(place), name))


class Store:
    """An open collection that was built by `search.index`; its queries may come from several threads."""

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
        """Raise StoreError unless queries of `embedder` may be compared with this collection's vectors.

        Names, prefixes and dimension are compared first; then a stored document is embedded again and must
        give its stored vector, which also detects other weights under the same name.
        """
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
        """Whether a folder's hashes were recorded; raises StoreError unless the collection has them.

        A Chroma server answers for its own files.
        """
        return self.place.folder is None or check_content(self.place.folder, self.name)

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages that have these ids, as they are embedded but for the prefix."""
        found = self.collection.get(ids=list(ids), include=["documents", "metadatas"])
        rows = zip(found["ids"], found["documents"] or [], found["metadatas"] or [], strict=True)
        return {key: passage_text(_title(metadata), text or "") for key, text, metadata in rows}

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return those of some documents' ids of which the collection has the whole or a chunk."""
        there = set(self.collection.get(ids=list(names), include=[])["ids"])
        if others := [name for name in names if name not in there]:
            of_them: Any = {"doc_id": {"$in": others}}
            chunks = self.collection.get(where=of_them, include=["metadatas"])
            there |= {str(metadata["doc_id"]) for metadata in chunks["metadatas"] or []}
        return there

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best first.

        The score is the cosine similarity, which follows from Chroma's distance. A `topk` beyond the
        collection's size gives all. Raises StoreUnavailable when the collection that was opened cannot answer
        now.
        """
        vectors = np.asarray(embeddings, dtype=np.float32)
        wanted = min(topk, self.info.chunks)
        # Repeated once if the collection turns out to be another object than the one that was opened.
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
                # Checked afterwards: a writer marks the collection first, so one that is unmarked now was not
                # being changed during the query.
                if opened.is_unchanged():
                    return _passages(found, wanted, _COSINE_LOSS[self.info.distance])
                self._forget(opened)
            except NotFoundError:  # the server no longer has a collection with this id
                self._forget(opened)
            except Exception as error:  # Chroma's, httpx's, and bare ones where Chroma knows no better
                cause = error.__context__
                status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else 0
                # At a rate limit another connection would only mean more calls.
                if status != 429 and not isinstance(error, RateLimitError):
                    self._forget(opened)
                raise StoreUnavailable(f"the index at {self.place} failed: {plain(error)}") from error
        raise StoreUnavailable(f"collection {self.name!r} in {self.place} is being replaced")

    def _ready(self) -> "_OpenCollection":
        """Return the open collection, reopened if necessary; the lock is held."""
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
    """One opening of a collection, and whether the collection is still what was opened.

    A folder is identified by its database file: a replaced one has another inode, and one that was written to
    has another time, which alone means little (anything that opens the folder writes to it), so then the
    metadata is read again. While the folder is missing, Chroma is not called: it would create an empty one.
    The vectors are read into memory before the first query; later changes to their files do no harm.
    """

    def __init__(self, place: ChromaPlace, name: str) -> None:
        self._place = place
        self._name = name
        self._loaded = False
        with ExitStack() as stack:
            # Before opening: a change in between is then seen at the first query.
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
        """Have Chroma read the vectors of a folder; raises StoreUnavailable if it cannot."""
        if self._place.folder is None or self._loaded:
            return
        try:
            self.collection.get(limit=1, include=["embeddings"])
        except Exception as error:  # as in Store.query
            raise StoreUnavailable(f"the index at {self._place} cannot be read: {plain(error)}") from error
        self._loaded = True

    def is_stale(self) -> bool:
        """Whether a folder must be opened again; raises StoreUnavailable while it is missing."""
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
        with suppress(Exception):  # of any kind: opening again reports what is wrong
            check_files(self._place.folder)
            if self._is_same():
                self._stamp = now
                return False
        return True

    def is_unchanged(self) -> bool:
        """Whether the collection is still the opened one; in a folder, only whether the folder is."""
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
        """Return device, inode, time and size of the folder's database file."""
        assert self._place.folder is not None
        try:
            found = os.stat(self._place.folder / DATABASE_FILE)
        except OSError as error:
            raise no_chroma(self._place.folder) from error
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _title(metadata: Mapping[str, Any] | None) -> str:
    """The title in a record's metadata, which a record of another tool may lack."""
    return str((metadata or {}).get("title") or "")


def _passages(found: Any, wanted: int, loss: float) -> list[list[ScoredPassage]]:
    """Convert Chroma's answer to passages; raises ValueError if some are missing."""
    rows = zip(found["documents"], found["metadatas"], found["distances"], strict=True)
    answers: list[list[ScoredPassage]] = [
        [
            {"document": make_passage(_title(metadata), text), "score": 1.0 - loss * distance}
            for text, metadata, distance in zip(*row, strict=True)
        ]
        for row in rows
    ]
    if short := [len(answer) for answer in answers if len(answer) != wanted]:
        raise ValueError(f"it returned {short[0]} of {wanted} passages")
    return answers
