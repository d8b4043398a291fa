"""An index in shards, as one: all shards are asked at once, and their answers are merged.

    with closing(chroma_index(["outputs/corpus/chromadb"], "corpus", shards=4).open()) as store:
        store.query(embeddings, topk=3)

A shard that cannot answer makes the query fail by the shard's name: a smaller answer would look like a whole
one. Shards that do not belong together are refused when they are opened.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from search.chroma.location import DATABASE_FILE, ChromaPlace
from search.chroma.shard_layout import ShardLayout
from search.chroma.store import DRAWS, ChromaIndex, Store, draw_from, iter_documents
from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.stored_index import CollectionInfo
from search.wire import ScoredPassage

Answer = TypeVar("Answer")
_ALIKE = (
    *("embedder", "revision", "dimension", "query_prefix", "passage_prefix", "chunk_tokens", "chunk_overlap"),
    *("distance", "normalised", "schema_version"),
)
"""What all shards of an index record alike."""


def merge(answers: Sequence[Sequence[ScoredPassage]], topk: int) -> list[ScoredPassage]:
    """Return the best `topk` of the shards' answers to one query, best first.

    Of equal scores the passage comes first whose title, then text, does: an order that does not depend on how
    many shards there are.
    """
    found = (hit for hits in answers for hit in hits)
    return heapq.nsmallest(
        topk, found, key=lambda hit: (-hit["score"], hit["document"]["title"], hit["document"]["text"])
    )


def whole_of(shards: Sequence[CollectionInfo]) -> CollectionInfo:
    """Return how the index of these shards was built, which is how one collection would record it."""
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


@dataclass(frozen=True)
class ShardedIndex:
    """Where the shards of an index are, before they are opened."""

    layout: ShardLayout

    @property
    def setting(self) -> str:
        """The config key that says where it is."""
        return "chroma.path"

    @property
    def name(self) -> str:
        """The collection's, without the shards' numbers."""
        return self.layout.collection

    @property
    def folder(self) -> Path | None:
        """The folder with all shards; None of a server, and of several places."""
        return self.layout.folder

    def __str__(self) -> str:
        return str(self.layout)

    def open(self) -> "ShardedStore":
        """Open all shards; raises StoreError if one cannot be, or they do not belong together."""
        return ShardedStore(self.layout)

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every document of all shards, sorted by id; raises StoreError."""
        layout = self.layout
        each = [iter_documents(*layout.place(number)) for number in range(layout.shards)]
        return heapq.merge(*each, key=lambda document: document[0])

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]] | None:
        """Yield the documents in the random order that one collection of them would give.

        None if a shard is without draws.
        """
        with closing(self.open()) as store:
            if store.info.draws != DRAWS:
                return None
        return draw_from([self.layout.place(number) for number in range(self.layout.shards)], seed)


def chroma_index(
    paths: Sequence[str | Path | ChromaPlace], collection: str, shards: int = 1
) -> "ChromaIndex | ShardedIndex":
    """Return the index in one collection, or in shards; raises StoreError as `ShardLayout.parse`."""
    layout = ShardLayout.parse(paths, collection, shards)
    return ChromaIndex(layout.places[0], collection) if shards == 1 else ShardedIndex(layout)


class ShardedStore:
    """The open shards of an index; its queries may come from several threads."""

    def __init__(self, layout: ShardLayout) -> None:
        layout.check_count()
        self.layout = layout
        self.name = layout.collection
        with ExitStack() as stack:
            self._shards = [
                stack.enter_context(closing(_open(layout, number))) for number in range(layout.shards)
            ]
            self.info = _checked(layout, [store.info for store in self._shards])
            self._threads = stack.enter_context(ThreadPoolExecutor(layout.shards, thread_name_prefix="shard"))
            self._release = stack.pop_all().close

    def close(self) -> None:
        """Release the files or connections of all shards."""
        self._release()

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return the nearest passages of each row of `embeddings` (n, dimension), best first.

        Scores and ties: see `merge`. A `topk` beyond the index's size gives all. Raises StoreUnavailable,
        which names the shard, when one cannot answer now.
        """
        answers = self._of_each(lambda store: store.query(embeddings, topk))
        return [merge(of_a_query, topk) for of_a_query in zip(*answers, strict=True)]

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless queries of `embedder` may be compared with every shard's vectors."""
        for number, store in enumerate(self._shards):
            with _naming(self.layout, number):
                store.check_embedder(embedder)

    def check_content(self) -> bool:
        """Whether hashes of all shards were recorded; raises StoreError unless their files have them."""
        return all(self._of_each(Store.check_content))

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages that have these ids, as they are embedded but for the prefix."""
        each = self._of_each(lambda store: store.passages_of(ids))
        return {key: passage for found in each for key, passage in found.items()}

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return those of some documents' ids of which the index has the whole or a chunk."""
        each = self._of_each(lambda store: store.documents_among(names))
        return {name for found in each for name in found}

    def _of_each(self, ask: Callable[[Store], Answer]) -> list[Answer]:
        """Ask all shards at once; raises the error of the first that fails, with its name."""

        def asked(number: int) -> Answer:
            with _naming(self.layout, number):
                return ask(self._shards[number])

        return list(self._threads.map(asked, range(self.layout.shards)))


@contextmanager
def _naming(layout: ShardLayout, number: int) -> Iterator[None]:
    try:
        yield
    except (StoreError, StoreUnavailable) as error:
        raise type(error)(f"{layout.label(number)}: {error}") from error


def _open(layout: ShardLayout, number: int) -> Store:
    place, name = layout.place(number)
    if place.folder is not None and not (place.folder / DATABASE_FILE).exists():
        where = " and ".join(map(str, layout.places))
        raise StoreNotReady(
            f"{layout.label(number)} of collection {name!r} is missing in {where}: build it, or finish a "
            "build that was cut off, with the same `drzero prepare-data source=…`"
        )
    with _naming(layout, number):
        return Store(place, name)


def _checked(layout: ShardLayout, infos: Sequence[CollectionInfo]) -> CollectionInfo:
    """How the index was built; raises StoreError, with the first two that differ, if shards disagree."""
    again = "index the corpus again with replace=true"
    for number, info in enumerate(infos):
        this, other = layout.label(number), layout.label(0)
        if info.shard != (wanted := f"{number}/{layout.shards}"):
            is_one = f"shard {info.shard}" if info.shard else "no shard"
            raise StoreError(f"what is at {this} of {layout} was built as {is_one}, not {wanted}: {again}")
        for what in _ALIKE:
            if (ours := getattr(info, what)) != (theirs := getattr(infos[0], what)):
                raise StoreError(
                    f"the shards of {layout} do not belong together, {what} is {theirs!r} in {other} and "
                    f"{ours!r} in {this}: {again}"
                )
        if info.whole != infos[0].whole:
            raise StoreError(
                f"{this} and {other} of {layout} are of different versions of the corpus: an update is "
                "running or was cut off; finish it with the same `drzero prepare-data source=…`"
            )
    return whole_of(infos)
