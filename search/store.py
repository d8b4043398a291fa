"""The Chroma store: collections that know which embedder made them.

What was true at indexing (`CollectionInfo`) is the collection's metadata, written last: a collection without
it was not finished or not built by `search.index`. The user's texts are Chroma documents, their titles are
metadata, the vectors are unit vectors, the distance is cosine.

    with open_collection("outputs/corpus/chromadb", "corpus") as store: store.query(embeddings, topk=3)

An open `Store` answers from the collection that was opened, or not at all (`StoreUnavailable`): after each
query it makes sure that this one is still there and still the same, and it comes back by itself when the
collection does. One that was replaced by another version is refused until the process is started again,
because the server's checks, its cache and the run's records are about the version it was started with.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import NotFoundError, RateLimitError

from search.chroma_files import DATABASE_FILE, check_files
from search.embedders import Embedder, model_identity
from search.place import ChromaPlace, StoreAway, StoreError, StoreUnavailable, connect, plain
from search.wire import ScoredPassage, make_passage

__all__ = [
    "BEING_WRITTEN",
    "DATABASE_FILE",
    "DISTANCE",
    "SCHEMA_VERSION",
    "ChromaPlace",
    "CollectionInfo",
    "Store",
    "StoreAway",
    "StoreError",
    "StoreUnavailable",
    "collection_names",
    "connect",
    "get_collection",
    "iter_documents",
    "open_collection",
    "passage_text",
]

# Raised when what is written changes, or how texts are split: older collections are then built anew.
SCHEMA_VERSION = 2
BEING_WRITTEN = "being_written"
"""In the metadata of a server's collection while it is indexed, in place of what `CollectionInfo` tells."""
DISTANCE: Literal["cosine"] = "cosine"
# The same text through the same weights differs by precision only (fp16 against fp32: about 1e-3).
SAME_VECTOR_COSINE = 0.99
# What a server gives in one answer: Chroma Cloud's quota is 300 records.
_SERVER_PAGE = 250


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


def collection_names(client: ClientAPI) -> list[str]:
    """Return the names of a Chroma's collections, sorted."""
    names: list[str] = []
    while page := client.list_collections(limit=_SERVER_PAGE, offset=len(names)):
        names += [collection.name for collection in page]
    return sorted(names)


def get_collection(client: ClientAPI, place: ChromaPlace | Path | str, name: str) -> chromadb.Collection:
    """Return a collection, whoever built it; raises StoreError with the names that exist."""
    try:
        return client.get_collection(name, embedding_function=None)
    except NotFoundError:
        names = ", ".join(collection_names(client)) or "none"
        raise StoreError(f"no collection {name!r} in {place}: it holds {names}") from None


class Store:
    """An open collection that was built by `search.index`; its queries may come from several threads."""

    def __init__(self, place: ChromaPlace, name: str) -> None:
        self.place = place
        self.name = name
        self._lock = threading.Lock()
        self._opened: _Opened | None = _Opened(place, name)
        self.collection = self._opened.collection
        self.info = self._opened.info

    def close(self) -> None:
        """Release the files or connections."""
        with self._lock:
            self._drop()

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
        title, text, stored_vector = self._sample()
        again = embedder.encode_passages([passage_text(title, text)])[0]
        cosine = float(np.dot(again, stored_vector))
        if cosine < SAME_VECTOR_COSINE:
            revisions = self.info.revision, embedder.revision
            self._refuse(
                embedder,
                f"the same text gets another vector (cosine {cosine:.3f}): its revision is",
                *revisions,
            )

    def _sample(self) -> tuple[str, str, np.ndarray]:
        """Return title, text and vector of a stored document."""
        try:
            found = self.collection.peek(1)
        except Exception as error:  # as in query
            raise StoreAway(f"the index at {self.place} failed: {plain(error)}") from error
        metadatas, documents, vectors = found["metadatas"], found["documents"], found["embeddings"]
        if not metadatas or not documents or vectors is None or documents[0] is None:
            raise StoreError(f"collection {self.name!r} in {self.place} lost its documents: build it anew")
        return str(metadatas[0].get("title", "")), documents[0], np.asarray(vectors[0], dtype=np.float32)

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best first.

        The score is the cosine similarity, 1 - Chroma's cosine distance. A `topk` beyond the collection's
        size gives all. Raises StoreUnavailable when the collection that was opened cannot answer now.
        """
        vectors = np.asarray(embeddings, dtype=np.float32)
        wanted = min(topk, self.info.chunks)
        # A second time if the collection was found to be another object than the one that was opened.
        for _ in range(2):
            with self._lock:
                opened = self._ready()
            try:
                found = self._ask(opened, vectors, wanted)
                if found is not None:
                    return _passages(found, wanted)
                self._forget(opened)
            except Exception as error:  # Chroma's, httpx's, and bare ones where Chroma knows no better
                if not _is_rate_limit(error):  # another connection would only be more calls
                    self._forget(opened)
                raise StoreUnavailable(f"the index at {self.place} failed: {plain(error)}") from error
        raise StoreUnavailable(f"collection {self.name!r} in {self.place} is being replaced")

    def _ready(self) -> "_Opened":
        """Return the open collection, opened again if it must be; the lock is held."""
        if self._opened is not None and self._opened.is_stale(self.info):
            self._drop()
        if self._opened is None:
            self._opened = self._open_again()
            self.collection = self._opened.collection
        try:
            self._opened.load()
        except StoreUnavailable:
            self._drop()
            raise
        return self._opened

    def _open_again(self) -> "_Opened":
        try:
            opened = _Opened(self.place, self.name)
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        except Exception as error:  # as in query
            raise StoreUnavailable(f"the index at {self.place} cannot be opened: {plain(error)}") from error
        if opened.info != self.info:
            opened.release()
            now, served = opened.info.version[:12], self.info.version[:12]
            raise StoreUnavailable(
                f"collection {self.name!r} in {self.place} is another version now ({now}, and {served} is "
                "served): restart the server to serve it"
            )
        return opened

    def _ask(self, opened: "_Opened", vectors: np.ndarray, wanted: int) -> Any:
        """Return Chroma's answer; None if the collection was not the opened one all the while."""
        try:
            found = opened.collection.query(
                query_embeddings=vectors,
                n_results=wanted,
                include=["documents", "metadatas", "distances"],
            )
        except NotFoundError:  # the server has no collection of this id any more
            return None
        # Afterwards: whoever writes marks the collection first, so that one which is unmarked now was not
        # being changed while it was asked.
        same = opened.is_same_on_server() if self.place.folder is None else not opened.is_moved()
        return found if same else None

    def _forget(self, opened: "_Opened") -> None:
        with self._lock:
            if self._opened is opened:
                self._drop()

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()

    def _refuse(self, embedder: Embedder, what: str, stored: object, ours: object) -> None:
        raise StoreError(
            f"collection {self.collection.name!r} was built with another embedder than {embedder.name!r}: "
            f"{what} {stored!r}, not {ours!r}. "
            f"Serve it with --embedder {self.info.embedder}, or index it again"
        )


class _Opened:
    """One opening of a collection, and whether it still is what was opened.

    A folder is known by its database file: another one in its place has another inode, and one that was
    written to has another time, which alone means little (whoever opens the folder writes to it), so that the
    metadata is read again. While it is away nothing is asked: Chroma would begin an empty folder there. The
    vectors are read into memory before the first query; what happens to their files later does no harm.
    """

    def __init__(self, place: ChromaPlace, name: str) -> None:
        self._place = place
        self._name = name
        self._loaded = False
        with ExitStack() as stack:
            # Before opening: a change meanwhile is then seen at the first query.
            self._stamp = self._look() if place.folder else None
            self._client = stack.enter_context(connect(place))
            self.collection = get_collection(self._client, place, name)
            self.info = _read_info(self.collection.metadata, place, name)
            self._release = stack.pop_all()

    def release(self) -> None:
        """Close the client."""
        self._release.close()

    def load(self) -> None:
        """Have Chroma read the vectors of a folder; raises StoreUnavailable if it cannot."""
        if self._place.folder is None or self._loaded:
            return
        try:
            self.collection.get(limit=1, include=["embeddings"])
        except Exception as error:  # as in Store.query
            raise StoreUnavailable(f"the index at {self._place} cannot be read: {plain(error)}") from error
        self._loaded = True

    def is_stale(self, info: CollectionInfo) -> bool:
        """Whether a folder must be opened again; raises StoreUnavailable while it is away."""
        if self._place.folder is None:
            return False
        try:
            now = self._look()
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        if now == self._stamp:
            return False
        if self._stamp is None or now[:2] != self._stamp[:2]:
            return True
        try:
            check_files(self._place.folder)
            handle = self._client.get_collection(self._name, embedding_function=None)
        except Exception:  # whatever it is: opening again says what is wrong
            return True
        if handle.id != self.collection.id or CollectionInfo.from_metadata(handle.metadata) != info:
            return True
        self._stamp = now
        return False

    def is_moved(self) -> bool:
        """Whether a folder was moved or replaced since it was last looked at."""
        try:
            return self._stamp is None or self._look()[:2] != self._stamp[:2]
        except StoreError:
            return True

    def is_same_on_server(self) -> bool:
        """Whether the server has this very collection, unchanged, under its name."""
        try:
            handle = self._client.get_collection(self._name, embedding_function=None)
        except NotFoundError:
            return False
        return handle.id == self.collection.id and CollectionInfo.from_metadata(handle.metadata) == self.info

    def _look(self) -> tuple[int, int, int, int]:
        """Return device, inode, time and size of the folder's database file."""
        assert self._place.folder is not None
        try:
            found = os.stat(self._place.folder / DATABASE_FILE)
        except OSError as error:
            raise StoreAway(f"no Chroma folder at {self._place} ({error.strerror})") from error
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _is_rate_limit(error: Exception) -> bool:
    told = error.__context__
    return isinstance(error, RateLimitError) or (
        isinstance(told, httpx.HTTPStatusError) and told.response.status_code == 429
    )


def _passages(found: Any, wanted: int) -> list[list[ScoredPassage]]:
    """Turn Chroma's answer into passages; raises ValueError for one that lacks some."""
    rows = zip(found["documents"], found["metadatas"], found["distances"], strict=True)
    answers: list[list[ScoredPassage]] = [
        [
            {"document": make_passage(str(metadata["title"]), text), "score": 1.0 - distance}
            for text, metadata, distance in zip(*row, strict=True)
        ]
        for row in rows
    ]
    if short := [len(answer) for answer in answers if len(answer) != wanted]:
        raise ValueError(f"it gave {short[0]} of {wanted} passages")
    return answers


def _read_info(metadata: Mapping[str, Any] | None, place: ChromaPlace, name: str) -> CollectionInfo:
    info = CollectionInfo.from_metadata(metadata)
    rebuild = f"build it anew: `python -m search.index --source {place} --source-collection {name} …`"
    schema = (metadata or {}).get("schema_version", SCHEMA_VERSION)
    if BEING_WRITTEN in (metadata or {}):
        raise StoreError(
            f"collection {name!r} in {place} is being indexed, or its indexing was cut off: wait for it, or "
            "run it again"
        )
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"collection {name!r} in {place} has schema {schema}, not {SCHEMA_VERSION}: {rebuild}"
        )
    if info is None:
        raise StoreError(
            f"collection {name!r} in {place} was not built by search.index (no metadata): {rebuild}"
        )
    return info


@contextmanager
def open_collection(place: ChromaPlace | Path | str, name: str) -> Iterator[Store]:
    """Open a collection; raises StoreError if it or its Chroma is missing, or it was not built by us."""
    store = Store(ChromaPlace.parse(place), name)
    try:
        yield store
    finally:
        store.close()


def iter_documents(
    place: ChromaPlace | Path | str, collection: str, batch: int = 1000
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of every document, sorted by id, of any collection, whoever built it.

    Of a collection that `search.index` built these are its chunks, with ids of their own. Memory is bounded:
    ids are sorted on disk, and one batch of texts is read at a time. A missing title or text is the empty
    string.
    """
    place = ChromaPlace.parse(place)
    batch = batch if place.folder else min(batch, _SERVER_PAGE)
    with connect(place) as client:
        handle = get_collection(client, place, collection)
        ids = _sorted_ids(handle, batch)
        while wanted := list(islice(ids, batch)):
            page = handle.get(ids=wanted, include=["documents", "metadatas"])
            rows = zip(page["ids"], page["metadatas"] or [], page["documents"] or [], strict=True)
            by_id = {key: (metadata, text) for key, metadata, text in rows}
            for key in wanted:
                metadata, text = by_id[key]
                yield key, str((metadata or {}).get("title") or ""), text or ""


def _sorted_ids(handle: chromadb.Collection, page: int) -> Iterator[str]:
    """Yield all ids of a collection in order, read `page` at a time."""
    # The empty name is a database of SQLite's own, on disk as soon as it outgrows its cache of some MiB.
    with closing(sqlite3.connect("")) as books:
        books.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        offset = 0
        while some := handle.get(include=[], limit=page, offset=offset)["ids"]:
            books.executemany("INSERT INTO ids VALUES (?)", ((key,) for key in some))
            offset += len(some)
        for (key,) in books.execute("SELECT id FROM ids ORDER BY id"):
            yield key
