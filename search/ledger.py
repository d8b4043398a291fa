"""The books of one indexing, on disk: what the corpus holds, what is there already, what is embedded.

    ledger = Ledger(folder / "ledger.sqlite3")
    surveyed = survey(corpus, ledger)

Three questions are answered without holding a corpus's ids in memory: is an id there twice, which documents
are new or changed or gone, and which chunks still lack their vectors. SQLite keeps the answers in one file,
of which at most `CACHE_KIB` are in memory. What was embedded survives a kill at any moment: chunks and
vectors are kept in transactions, a unit (some `UNIT` chunks of whole documents) at a time. Chroma's own
files do not give that, since it writes its vector files in place.

Documents are compared by id and digest, so that vectors are good for the next run even if the corpus has
changed meanwhile. Vectors depend, in their last bits, on what else was in their batch: units are cut anew
from what is to be done, in the corpus's order, and are therefore the same after a kill as without one.
"""

import json
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from search.chunking import Chunk
from search.corpus import Corpus, CorpusError, Document
from search.store import passage_text

CACHE_KIB = 64 * 1024
UNIT = 256
"""Chunks that are embedded and kept together, at least: what a kill loses."""
SCHEMA = """
-- The corpus as surveyed by this run.
CREATE TABLE source (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL);
-- The chunks of the collection that is there, and the documents of them that stay as they are.
CREATE TABLE present (chunk TEXT PRIMARY KEY, document TEXT NOT NULL, digest TEXT, places INTEGER);
CREATE INDEX present_document ON present (document);
CREATE TABLE kept (document TEXT PRIMARY KEY);
-- Documents to be split by this run, and which unit the chunks of a document are in.
CREATE TABLE wanted (position INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE units (document TEXT PRIMARY KEY, unit INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE INDEX units_unit ON units (unit, position);
"""
LASTING_SCHEMA = """
CREATE TABLE settings (settings TEXT NOT NULL);
CREATE TABLE chunks (
  number INTEGER PRIMARY KEY, document TEXT NOT NULL, digest TEXT NOT NULL, place INTEGER NOT NULL,
  places INTEGER NOT NULL, id TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL
);
CREATE UNIQUE INDEX chunks_document ON chunks (document, place);
CREATE TABLE vectors (chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL);
"""
RUN_TABLES = ("source", "present", "kept", "wanted", "units")


@dataclass(frozen=True)
class Row:
    """A chunk in the ledger."""

    number: int
    id: str
    title: str
    text: str
    document: str
    digest: str
    place: int
    places: int

    @property
    def passage(self) -> str:
        """What is embedded, without the passage prefix."""
        return passage_text(self.title, self.text)

    def metadata(self) -> dict[str, str]:
        """Return what Chroma keeps beside the text."""
        return {
            "title": self.title,
            "doc_id": self.document,
            "doc_digest": self.digest,
            "chunk": f"{self.place}/{self.places}",
        }


@dataclass(frozen=True)
class Survey:
    """A corpus that was read through.

    `version` is the sum of the documents' hashes: the same documents in another order are the same corpus.
    """

    version: str
    documents: int
    duplicates: int


@dataclass(frozen=True)
class Changes:
    """How a corpus differs from the collection that is there, in documents."""

    present: int = 0
    kept: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0


class Ledger:
    """The books in the SQLite file at `path`, made if there is none; what earlier runs embedded is kept.

    `read_only` is for another process that reads while one writes.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        # No implicit transactions: each write says where its own begins and ends.
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}", uri=True, isolation_level=None
        )
        if not read_only:
            self._prepare()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        with self.transaction():
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone():
                self._run_script(LASTING_SCHEMA)
            for table in RUN_TABLES:
                self._db.execute(f"DROP TABLE IF EXISTS {table}")
            self._run_script(SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # --- settings of what is kept ---

    def settle(self, settings: Mapping[str, Any]) -> int:
        """Drop what was embedded under other settings; return how many vectors that were."""
        wanted = json.dumps(settings, sort_keys=True)
        found = self._db.execute("SELECT settings FROM settings").fetchone()
        if found == (wanted,):
            return 0
        dropped = self.vector_count()
        with self.transaction():
            for table in ("settings", "chunks", "vectors"):
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute("INSERT INTO settings VALUES (?)", (wanted,))
        return dropped

    # --- the corpus ---

    def add_source(self, position: int, document: Document, digest: str) -> tuple[int, str] | None:
        """Note a document; return position and digest of an earlier one of the same id, if there is one."""
        added = self._db.execute(
            "INSERT OR IGNORE INTO source VALUES (?, ?, ?)", (position, document.id, digest)
        ).rowcount
        if added:
            return None
        found: tuple[int, str] = self._db.execute(
            "SELECT position, digest FROM source WHERE id = ?", (document.id,)
        ).fetchone()
        return found

    # --- what is there ---

    def add_present(self, chunks: Iterable[tuple[str, str, str | None, int]]) -> None:
        """Note chunks that are there: id, document, digest, number of the document's chunks."""
        with self.transaction():
            self._db.executemany("INSERT INTO present VALUES (?, ?, ?, ?)", chunks)

    def compare(self) -> Changes:
        """Find the documents that stay as they are: of the same digest, with all their chunks."""
        with self.transaction():
            self._db.execute(
                "INSERT INTO kept SELECT s.id FROM source s JOIN present p ON p.document = s.id AND "
                "p.digest = s.digest GROUP BY s.id HAVING count(*) = max(p.places)"
            )
        present = self._number("SELECT count(DISTINCT document) FROM present")
        kept = self._number("SELECT count(*) FROM kept")
        removed = self._number(
            "SELECT count(DISTINCT document) FROM present WHERE document NOT IN (SELECT id FROM source)"
        )
        source = self._number("SELECT count(*) FROM source")
        changed = present - kept - removed
        return Changes(present, kept, source - kept - changed, changed, removed)

    def keep_none(self) -> None:
        """Forget what is there: everything is to be written."""
        with self.transaction():
            self._db.execute("DELETE FROM kept")
            self._db.execute("DELETE FROM present")

    def stale_chunks(self) -> Iterator[str]:
        """Yield the ids of chunks that are there and must go."""
        for (chunk,) in self._db.execute(
            "SELECT chunk FROM present p WHERE NOT EXISTS (SELECT 1 FROM source s JOIN kept k "
            "ON k.document = s.id WHERE s.id = p.document AND s.digest = p.digest)"
        ):
            yield chunk

    def kept_chunk_count(self) -> int:
        """Return how many of the chunks that are there stay."""
        return self._number("SELECT count(*) FROM present") - sum(1 for _ in self.stale_chunks())

    # --- chunks ---

    def want(self) -> tuple[int, int]:
        """Find the documents to be split, and drop the chunks of an earlier run that are of no use now.

        Returns how many documents are to be split, and how many vectors were dropped.
        """
        with self.transaction():
            self._db.execute(
                "DELETE FROM chunks WHERE document IN (SELECT document FROM kept) OR NOT EXISTS "
                "(SELECT 1 FROM source s WHERE s.id = chunks.document AND s.digest = chunks.digest)"
            )
            dropped = self._db.execute(
                "DELETE FROM vectors WHERE chunk NOT IN (SELECT number FROM chunks)"
            ).rowcount
            self._db.execute(
                "INSERT INTO wanted SELECT position, digest FROM source s "
                "WHERE NOT EXISTS (SELECT 1 FROM kept k WHERE k.document = s.id) "
                "AND NOT EXISTS (SELECT 1 FROM chunks c WHERE c.document = s.id)"
            )
        return self._number("SELECT count(*) FROM wanted"), dropped

    def wanted(self) -> Iterator[tuple[int, str]]:
        """Yield position and digest of the documents to be split, in the corpus's order."""
        yield from self._db.execute("SELECT position, digest FROM wanted ORDER BY position")

    def add_chunks(self, documents: Iterable[tuple[Document, str, Sequence[Chunk]]]) -> None:
        """Keep the chunks of some documents (with their digests), all or none."""
        rows = (
            (document.id, digest, chunk.place, chunk.places, chunk.id, chunk.title, chunk.text)
            for document, digest, chunks in documents
            for chunk in chunks
        )
        with self.transaction():
            self._db.executemany(
                "INSERT INTO chunks (document, digest, place, places, id, title, text) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def make_units(self) -> int:
        """Cut what is to be written into units, of whole documents in the corpus's order; return how many."""
        sizes = self._db.execute(
            "SELECT c.document, s.position, c.places FROM chunks c JOIN source s ON s.id = c.document "
            "WHERE c.place = 1 ORDER BY s.position"
        )
        unit = size = 0

        def numbered() -> Iterator[tuple[str, int, int]]:
            nonlocal unit, size
            for document, position, chunks in sizes:
                if size >= UNIT:
                    unit, size = unit + 1, 0
                size += chunks
                yield document, unit, position

        with self.transaction():
            self._db.execute("DELETE FROM units")
            self._db.executemany("INSERT INTO units VALUES (?, ?, ?)", numbered())
        return unit + 1 if size else 0

    # --- vectors ---

    def lacking(self, unit: int) -> list[Row]:
        """Return the chunks of a unit that have no vectors yet."""
        found = self._db.execute(
            f"SELECT {_ROW} FROM units u JOIN chunks c USING (document) "
            "LEFT JOIN vectors v ON v.chunk = c.number WHERE u.unit = ? AND v.chunk IS NULL "
            "ORDER BY u.position, c.place",
            (unit,),
        )
        return [Row(*row) for row in found]

    def keep_vectors(self, rows: Sequence[Row], vectors: np.ndarray) -> None:
        """Keep the vectors (len(rows), dimension) of some chunks, all or none."""
        pairs = (
            (row.number, vector.astype("<f4").tobytes()) for row, vector in zip(rows, vectors, strict=True)
        )
        with self.transaction():
            self._db.executemany("INSERT INTO vectors VALUES (?, ?)", pairs)

    def embedded(self, unit: int) -> tuple[list[Row], np.ndarray]:
        """Return the chunks of a unit with their vectors."""
        found = self._db.execute(
            f"SELECT {_ROW}, v.vector FROM units u JOIN chunks c USING (document) "
            "JOIN vectors v ON v.chunk = c.number WHERE u.unit = ? ORDER BY u.position, c.place",
            (unit,),
        ).fetchall()
        return [Row(*row[:-1]) for row in found], np.stack([np.frombuffer(row[-1], "<f4") for row in found])

    def chunk_count(self) -> int:
        """Return how many chunks are to be written."""
        return self._number("SELECT count(*) FROM chunks")

    def vector_count(self) -> int:
        """Return how many chunks are embedded."""
        return self._number("SELECT count(*) FROM vectors")

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _run_script(self, script: str) -> None:
        # Not executescript, which ends the transaction.
        for statement in script.split(";"):
            self._db.execute(statement)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep all that is written inside, or nothing if it fails."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


_ROW = "c.number, c.id, c.title, c.text, c.document, c.digest, c.place, c.places"


def survey(corpus: Corpus, ledger: Ledger) -> Survey:
    """Read a whole corpus; raises CorpusError if it is empty, has a bad record or an id twice."""
    total = documents = duplicates = 0
    with ledger.transaction():
        for number, document in tqdm(corpus.read(), desc="reading", unit=" docs", mininterval=1.0, delay=1.0):
            digest = document.digest()
            earlier = ledger.add_source(number, document, digest.hex())
            if earlier is None:
                total += int.from_bytes(digest)
                documents += 1
            elif earlier[1] == digest.hex():
                duplicates += 1
            else:
                raise CorpusError(
                    f"{corpus.place(number)} has the id {document.id!r} of {corpus.place(earlier[0])}, "
                    "but another text or title"
                )
    if not documents:
        raise CorpusError(f"{corpus.source} holds no documents")
    return Survey(f"{total % 2**256:064x}", documents, duplicates)


def read_wanted(corpus: Corpus, ledger: Ledger) -> Generator[tuple[Document, str], None, None]:
    """Yield the documents to be split, with digests; raises CorpusError if the corpus has changed since."""
    wanted = ledger.wanted()
    want = next(wanted, None)
    if want is None:
        return
    for number, document in corpus.read():
        if number != want[0]:
            continue
        if document.digest().hex() != want[1]:
            raise CorpusError(f"{corpus.place(number)} changed while the corpus was indexed: run it again")
        yield document, want[1]
        want = next(wanted, None)
        if want is None:
            return
    raise CorpusError(f"{corpus.source} lost documents while it was indexed: run it again")
