"""A Chroma index: one collection, or shards asked at once. If one shard cannot answer, the query fails."""

import hashlib
import heapq
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from search.chroma.location import ChromaPlace, connect, other_shards, shard_counts, shards_in
from search.chroma.store import DRAWS, Store, collection_names, draw_from, iter_documents
from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.stored_index import DATABASE_FILE, CollectionInfo
from search.wire import ScoredPassage

Answer = TypeVar("Answer")
_ALIKE = (
    *("embedder", "revision", "dimension", "query_prefix", "passage_prefix", "chunk_tokens", "chunk_overlap"),
    *("distance", "normalised", "schema_version"),
)
"""Fields that all shards of an index must share."""


def shard_of(document: str, shards: int) -> int:
    """Return the number of the shard that holds the document with this id."""
    # Not the bytes that `search.chroma.store.draw_of` uses, so that each shard has records of every draw.
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[2:10]) % shards


# What Chroma's server (1.5) accepts, else it refuses a collection after everything is embedded.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,510}[A-Za-z0-9]")
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}")


@dataclass(frozen=True)
class ChromaIndex:
    """The location of an index that is not open yet: `places` hold its `shards` in turn."""

    setting: ClassVar[str] = "chroma.path"
    places: tuple[ChromaPlace, ...]
    name: str
    shards: int

    def __str__(self) -> str:
        shards = f"{self.shards} shards in " if self.shards > 1 else ""
        return f"collection {self.name!r} in {shards}{', '.join(map(str, self.places))}"

    @property
    def folder(self) -> Path | None:
        """The folder with all shards, or None for a server or several places."""
        return self.places[0].folder if len(self.places) == 1 else None

    def label(self, number: int) -> str:
        """Return a shard's name in messages."""
        return f"shard-{number:02d}-of-{self.shards:02d}"

    def place(self, number: int) -> tuple[ChromaPlace, str]:
        """Return a shard's Chroma and its collection's name there. A single shard has the plain names."""
        place = self.places[number % len(self.places)]
        if self.shards == 1:
            return place, self.name
        if place.folder is None:
            return place, f"{self.name}-{number:02d}-of-{self.shards:02d}"
        folder = place.folder / self.label(number)
        return replace(place, text=str(folder), folder=folder), self.name

    def each(self) -> list[tuple[ChromaPlace, str]]:
        """Return `place` of all shards."""
        return [self.place(number) for number in range(self.shards)]

    def check_count(self) -> None:
        """Raise StoreError if any place holds this index in another number of shards."""
        for place in self.places:
            if place.folder is not None:
                unfinished = place.folder.parent / f".{place.folder.name}.building" / "journal.sqlite3"
                is_whole = (place.folder / DATABASE_FILE).exists() or unfinished.exists()
                found = shards_in(place.folder)
            else:
                with connect(place) as client:
                    names = collection_names(client)
                found, is_whole = shard_counts(names, self.name), self.name in names
            if others := found - {self.shards} | ({1} if is_whole else set()):
                raise other_shards(place, min(others), self.shards)

    def open(self) -> "Store | ShardedStore":
        """Open it. Raises StoreError if it is missing, of another tool, or not the whole."""
        if self.shards > 1:
            return ShardedStore(self)
        store = Store(*self.place(0))
        if shard := store.info.shard:
            store.close()
            raise StoreError(
                f"{self} is shard {shard} of an index, and answers for a part of it: open the whole "
                f"(chroma.shards={shard.rpartition('/')[2]}, and chroma.path as it was built)"
            )
        return store

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every document, sorted by id. Raises StoreError."""
        return heapq.merge(*(iter_documents(*shard) for shard in self.each()), key=itemgetter(0))

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]] | None:
        """Yield the documents in a random order that does not depend on shards, None without draws."""
        with closing(self.open()) as store:
            return draw_from(self.each(), seed) if store.info.draws == DRAWS else None


def chroma_index(paths: Sequence[str | Path | ChromaPlace], collection: str, shards: int = 1) -> ChromaIndex:
    """Return the index at folders or addresses. Raises StoreError for bad ones, or for more than shards."""
    places = tuple(map(ChromaPlace.parse, paths))
    if not 0 < len(set(places)) == len(places) <= shards:
        listed = ", ".join(map(str, places)) or "nothing"
        raise StoreError(
            f"chroma.path names {listed} for chroma.shards={shards}: name each place once, and no more "
            "places than shards"
        )
    longest = f"{collection}-00-of-{shards:02d}" if shards > 1 else collection
    if not _NAME.fullmatch(longest) or ".." in longest or _ADDRESS.fullmatch(longest):
        raise StoreError(
            f"chroma.collection={collection} is no name for Chroma: write 3 to 512 of a-z, A-Z, 0-9, ._- "
            "(no .. and no IP address), beginning and ending with a letter or digit"
        )
    return ChromaIndex(places, collection, shards)


def merge(answers: Sequence[Sequence[ScoredPassage]], topk: int) -> list[ScoredPassage]:
    """Return the best `topk` of the shards' answers to one query. Title and text decide ties."""
    found = (hit for hits in answers for hit in hits)
    return heapq.nsmallest(
        topk, found, key=lambda hit: (-hit["score"], hit["document"]["title"], hit["document"]["text"])
    )


def whole_of(shards: Sequence[CollectionInfo]) -> CollectionInfo:
    """Return how one collection of all shards' documents would be recorded."""
    first = shards[0]
    return replace(
        first,
        documents=sum(info.documents for info in shards),
        chunks=sum(info.chunks for info in shards),
        version=first.whole,
        draws=min(info.draws for info in shards),
        shard="",
        whole="",
    )


class ShardedStore:
    """The open shards of an index. Several threads may query it."""

    def __init__(self, index: ChromaIndex) -> None:
        index.check_count()
        self._index = index
        self.name = index.name
        with ExitStack() as stack:
            self._shards = [
                stack.enter_context(closing(_open(index, number))) for number in range(index.shards)
            ]
            self.info = _checked(index, [store.info for store in self._shards])
            self._threads = stack.enter_context(ThreadPoolExecutor(index.shards, thread_name_prefix="shard"))
            self._release = stack.pop_all().close

    def close(self) -> None:
        """Release the files or connections of all shards."""
        self._release()

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return each row's nearest passages, as `StoredIndex.query`. `merge` orders ties."""
        answers = self._of_each(lambda store: store.query(embeddings, topk))
        return [merge(of_a_query, topk) for of_a_query in zip(*answers, strict=True)]

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless queries of `embedder` are comparable with every shard's vectors."""
        for number, store in enumerate(self._shards):
            with _naming(self._index, number):
                store.check_embedder(embedder)

    def check_content(self) -> bool:
        """Return whether all shards' hashes were recorded. Raises StoreError unless their files match."""
        return all(self._of_each(Store.check_content))

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages with these ids, as embedded but without prefix."""
        each = self._of_each(lambda store: store.passages_of(ids))
        return {key: passage for found in each for key, passage in found.items()}

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return the document ids that the index holds, whole or in chunks."""
        each = self._of_each(lambda store: store.documents_among(names))
        return {name for found in each for name in found}

    def _of_each(self, ask: Callable[[Store], Answer]) -> list[Answer]:
        """Ask all shards at once. Raises the first error, with the shard's name."""

        def asked(number: int) -> Answer:
            with _naming(self._index, number):
                return ask(self._shards[number])

        return list(self._threads.map(asked, range(self._index.shards)))


@contextmanager
def _naming(index: ChromaIndex, number: int) -> Iterator[None]:
    try:
        yield
    except (StoreError, StoreUnavailable) as error:
        raise type(error)(f"{index.label(number)}: {error}") from error


def _open(index: ChromaIndex, number: int) -> Store:
    place, name = index.place(number)
    if place.folder is not None and not (place.folder / DATABASE_FILE).exists():
        where = " and ".join(map(str, index.places))
        raise StoreNotReady(
            f"{index.label(number)} of collection {name!r} is missing in {where}: build it, or finish a "
            "build that was cut off, with the same `drzero prepare-data source=…`"
        )
    with _naming(index, number):
        return Store(place, name)


def _checked(index: ChromaIndex, infos: Sequence[CollectionInfo]) -> CollectionInfo:
    """Return how the index was built. Raises StoreError, naming the first two shards that disagree."""
    again = "index the corpus again with replace=true"
    for number, info in enumerate(infos):
        this, other = index.label(number), index.label(0)
        if info.shard != (wanted := f"{number}/{index.shards}"):
            is_one = f"shard {info.shard}" if info.shard else "no shard"
            raise StoreError(f"what is at {this} of {index} was built as {is_one}, not {wanted}: {again}")
        for what in _ALIKE:
            if (ours := getattr(info, what)) != (theirs := getattr(infos[0], what)):
                raise StoreError(
                    f"the shards of {index} do not belong together, {what} is {theirs!r} in {other} and "
                    f"{ours!r} in {this}: {again}"
                )
        if info.whole != infos[0].whole:
            raise StoreError(
                f"{this} and {other} of {index} are of different versions of the corpus: an update is "
                "running or was cut off; finish it with the same `drzero prepare-data source=…`"
            )
    return whole_of(infos)
