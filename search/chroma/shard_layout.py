"""Where the shards of an index are, and which shard holds a document.

    ShardLayout.parse(["outputs/corpus/chromadb"], "corpus", 4).place(0)    # a folder and 'corpus'

Each shard is a complete Chroma collection: a Chroma below a folder, or a collection `corpus-00-of-04` on a
server.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from search.chroma.location import ChromaPlace, connect, other_shards, shard_counts, shards_in
from search.chroma.store import collection_names
from search.errors import StoreError
from search.stored_index import DATABASE_FILE


def shard_of(document: str, shards: int) -> int:
    """Return the number of the shard that holds the document with this id."""
    # Not the bytes that `search.chroma.store.draw_of` uses, so that each shard has records of every draw.
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[2:10]) % shards


@dataclass(frozen=True)
class ShardLayout:
    """The shards of one index: `places` that hold them in turn, the collection's name, and their number."""

    places: tuple[ChromaPlace, ...]
    collection: str
    shards: int

    @classmethod
    def parse(cls, paths: Sequence[str | Path | ChromaPlace], collection: str, shards: int) -> "ShardLayout":
        """Read folders or addresses. Raises StoreError for a bad one, or for more of them than shards."""
        places = tuple(map(ChromaPlace.parse, paths))
        if not 0 < len(set(places)) == len(places) <= shards:
            listed = ", ".join(map(str, places)) or "nothing"
            raise StoreError(
                f"chroma.path names {listed} for chroma.shards={shards}: name each place once, and no more "
                "places than shards"
            )
        return cls(places, collection, shards)

    def __str__(self) -> str:
        shards = f"{self.shards} shards in " if self.shards > 1 else ""
        return f"collection {self.collection!r} in {shards}{', '.join(map(str, self.places))}"

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
            return place, self.collection
        if place.folder is None:
            return place, f"{self.collection}-{number:02d}-of-{self.shards:02d}"
        folder = place.folder / self.label(number)
        return replace(place, text=str(folder), folder=folder), self.collection

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
                found, is_whole = shard_counts(names, self.collection), self.collection in names
            if others := found - {self.shards} | ({1} if is_whole else set()):
                raise other_shards(place, min(others), self.shards)
