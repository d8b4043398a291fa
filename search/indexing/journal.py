"""The journal of one index build, on disk: the corpus, the existing collection, and finished vectors.

Units (about `UNIT` chunks of whole documents) are committed one at a time, so they survive a kill. A vector's
last bits depend on its batch, so every run cuts the same units, in corpus order.
"""

import json
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from search.indexing.chunking import Chunk
from search.indexing.progress import progress
from search.sources.corpus import Corpus, Reading
from search.sources.document import CorpusError, Document, Fault
from search.sources.files import KINDS
from search.stored_index import passage_text

CACHE_KIB = 64 * 1024
UNIT = 256  # Least chunks embedded and committed together, which a kill loses
SCHEMA = """
-- The corpus as surveyed by this run.
CREATE TABLE source (
  position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, content BLOB NOT NULL UNIQUE,
  origin TEXT NOT NULL
);
-- The chunks of the existing collection, and those of its documents that stay unchanged.
CREATE TABLE existing (chunk TEXT PRIMARY KEY, document TEXT NOT NULL, digest TEXT, parts INTEGER);
CREATE INDEX existing_document ON existing (document);
CREATE TABLE kept (document TEXT PRIMARY KEY);
-- Documents to be split by this run, and the unit that holds the chunks of each document.
CREATE TABLE unsplit (position INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE units (document TEXT PRIMARY KEY, unit INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE INDEX units_unit ON units (unit, position);
"""
LASTING_SCHEMA = """
CREATE TABLE settings (settings TEXT NOT NULL);
CREATE TABLE chunks (
  number INTEGER PRIMARY KEY, document TEXT NOT NULL, digest TEXT NOT NULL, part INTEGER NOT NULL,
  parts INTEGER NOT NULL, id TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL
);
CREATE UNIQUE INDEX chunks_document ON chunks (document, part);
CREATE TABLE vectors (chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL);
"""
_EXAMPLES = 5  # Duplicates to name
ROW = "c.number, c.id, c.title, c.text, c.document, c.digest, c.part, c.parts"


@dataclass(frozen=True)
class JournalRow:
    """A chunk in the journal."""

    number: int
    id: str
    title: str
    text: str
    document: str
    digest: str
    part: int
    parts: int

    @property
    def passage(self) -> str:
        """The text to embed, without the passage prefix."""
        return passage_text(self.title, self.text)

    def metadata(self) -> dict[str, str]:
        """Return the chunk's metadata in an index."""
        return {
            "title": self.title,
            "doc_id": self.document,
            "doc_digest": self.digest,
            "chunk": f"{self.part}/{self.parts}",
        }


@dataclass(frozen=True)
class Survey:
    """A corpus that was read once. `version` ignores the order, `duplicates` ignore white space."""

    version: str
    documents: int
    duplicates: int
    reading: Reading
    examples: list[tuple[str, str]]


@dataclass(frozen=True)
class Changes:
    """How a corpus differs from the existing collection, in documents."""

    existing: int = 0
    kept: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0

    @property
    def is_update(self) -> bool:
        """Whether at least half of the documents stay. Otherwise it is probably another corpus."""
        return 2 * self.kept >= self.existing


class IndexJournal:
    """The journal at `path`, created if missing, with earlier runs' vectors. `read_only` changes nothing."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        # No implicit transactions: each write marks its own begin and end.
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}", uri=True, isolation_level=None
        )
        self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        if read_only:
            return
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        with self.transaction():
            is_new = not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone()
            of_a_run = ("source", "existing", "kept", "unsplit", "units")
            dropped = "".join(f"DROP TABLE IF EXISTS {table};" for table in of_a_run)
            # Not executescript, which ends the transaction.
            for statement in ((LASTING_SCHEMA if is_new else "") + dropped + SCHEMA).split(";"):
                self._db.execute(statement)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written inside, or nothing if the body fails."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has already ended it
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def use_settings(self, settings: Mapping[str, Any]) -> int:
        """Drop vectors of other settings. Returns how many vectors were dropped."""
        wanted = json.dumps(settings, sort_keys=True)
        if self._db.execute("SELECT settings FROM settings").fetchone() == (wanted,):
            return 0
        dropped = self.vector_count()
        with self.transaction():
            for table in ("settings", "chunks", "vectors"):
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute("INSERT INTO settings VALUES (?)", (wanted,))
        return dropped

    def survey(self, corpus: Corpus) -> Survey:
        """Read a whole corpus. Raises CorpusError for an empty or faulty one (as two texts of one id)."""
        total = documents = duplicates = 0
        reading = Reading()
        examples: list[tuple[str, str]] = []
        with self.transaction():
            for number, document in progress("reading", "documents", done=corpus.read(reading)):
                digest, content, origin = document.digest(), document.content(), str(document.origin)
                record = (number, document.id, digest.hex(), content, origin)
                if self._db.execute("INSERT OR IGNORE INTO source VALUES (?, ?, ?, ?, ?)", record).rowcount:
                    total += int.from_bytes(digest)
                    documents += 1
                    continue
                its_content, its_origin = self._db.execute(
                    # Of the id first: another text under it is a fault, even one that stands elsewhere too.
                    "SELECT content, origin FROM source WHERE id = ?1 OR content = ?2 ORDER BY id = ?1 DESC",
                    (document.id, content),
                ).fetchone()
                if its_content != content:
                    why = f"has the id {document.id!r} of {its_origin}, but another text or title"
                    reading.faults.add(Fault(document.origin, why))
                    continue
                duplicates += 1
                if len(examples) < _EXAMPLES:
                    examples.append((origin, its_origin))
        corpus.check(reading)
        if not documents:
            skipped = f": all {reading.faults.total} were faulty" if reading.faults else f": {KINDS}"
            raise CorpusError(f"{corpus} holds no documents{skipped}")
        return Survey(f"{total % 2**256:064x}", documents, duplicates, reading, examples)

    def compare(self, chunks: Iterable[tuple[str, str, str | None, int]]) -> Changes:
        """Find unchanged documents: same digest, and all `chunks` exist (id, document, digest, parts)."""
        with self.transaction():
            self._db.executemany("INSERT INTO existing VALUES (?, ?, ?, ?)", chunks)
            self._db.execute(
                "INSERT INTO kept SELECT s.id FROM source s JOIN existing e ON e.document = s.id AND "
                "e.digest = s.digest GROUP BY s.id HAVING count(*) = max(e.parts)"
            )
        existing = self._number("SELECT count(DISTINCT document) FROM existing")
        kept = self._number("SELECT count(*) FROM kept")
        removed = self._number(
            "SELECT count(DISTINCT document) FROM existing WHERE document NOT IN (SELECT id FROM source)"
        )
        changed = existing - kept - removed
        added = self._number("SELECT count(*) FROM source") - kept - changed
        return Changes(existing, kept, added, changed, removed)

    def forget_existing(self) -> None:
        """Ignore the existing collection, to write everything."""
        with self.transaction():
            self._db.execute("DELETE FROM kept")
            self._db.execute("DELETE FROM existing")

    def reuse(self, embedded: Iterable[tuple[Sequence[str], np.ndarray]]) -> int:
        """Take over unchanged documents' chunks (as `FaissFolder.embedded` yields them). Returns how many."""
        count = 0
        with self.transaction():
            kept = "INSERT OR IGNORE INTO chunks (document, digest, part, parts, id, title, text) "
            for chunk, vector in embedded:
                row = self._db.execute(
                    f"{kept} SELECT ?, ?, ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM kept WHERE document = ?)",
                    (*chunk, chunk[0]),
                )
                if row.rowcount:
                    blob = vector.astype("<f4").tobytes()
                    self._db.execute("INSERT INTO vectors VALUES (?, ?)", (row.lastrowid, blob))
                    count += 1
        return count

    def stale_chunks(self) -> Iterator[str]:
        """Yield the ids of existing chunks to delete."""
        for (chunk,) in self._db.execute(
            "SELECT chunk FROM existing e WHERE NOT EXISTS (SELECT 1 FROM source s JOIN kept k "
            "ON k.document = s.id WHERE s.id = e.document AND s.digest = e.digest)"
        ):
            yield chunk

    def kept_chunk_count(self) -> int:
        """Return how many existing chunks stay."""
        return self._number("SELECT count(*) FROM existing") - sum(1 for _ in self.stale_chunks())

    def select_unsplit(self) -> tuple[int, int]:
        """Find documents to split, and drop vectors no longer needed. Returns both numbers."""
        with self.transaction():
            self._db.execute(
                "DELETE FROM chunks WHERE document IN (SELECT document FROM kept) OR NOT EXISTS "
                "(SELECT 1 FROM source s WHERE s.id = chunks.document AND s.digest = chunks.digest)"
            )
            dropped = self._db.execute(
                "DELETE FROM vectors WHERE chunk NOT IN (SELECT number FROM chunks)"
            ).rowcount
            self._db.execute(
                "INSERT INTO unsplit SELECT position, digest FROM source s "
                "WHERE NOT EXISTS (SELECT 1 FROM kept k WHERE k.document = s.id) "
                "AND NOT EXISTS (SELECT 1 FROM chunks c WHERE c.document = s.id)"
            )
        return self._number("SELECT count(*) FROM unsplit"), dropped

    def read_unsplit(self, corpus: Corpus) -> Generator[tuple[Document, str], None, None]:
        """Yield the documents to split, with digests. Raises CorpusError if the corpus has changed since."""
        unsplit = self._db.execute("SELECT position, digest FROM unsplit ORDER BY position")
        expected = unsplit.fetchone()
        if expected is None:
            return
        for number, document in corpus.read():
            if number != expected[0]:
                continue
            if document.digest().hex() != expected[1]:
                raise CorpusError(f"{document.origin} changed while the corpus was indexed: run it again")
            yield document, expected[1]
            expected = unsplit.fetchone()
            if expected is None:
                return
        raise CorpusError(f"{corpus} lost documents while it was indexed: run it again")

    def add_chunks(self, documents: Iterable[tuple[Document, str, Sequence[Chunk]]]) -> None:
        """Store the chunks of some documents (with their digests), all or none."""
        rows = (
            (document.id, digest, chunk.part, chunk.parts, chunk.id, chunk.title, chunk.text)
            for document, digest, chunks in documents
            for chunk in chunks
        )
        with self.transaction():
            self._db.executemany(
                "INSERT INTO chunks (document, digest, part, parts, id, title, text) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def make_units(self) -> int:
        """Cut the chunks to write into units of whole documents in corpus order. Returns how many units."""
        sizes = self._db.execute(
            "SELECT c.document, s.position, c.parts FROM chunks c JOIN source s ON s.id = c.document "
            "WHERE c.part = 1 ORDER BY s.position"
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

    def chunk_count(self) -> int:
        """Return how many chunks are to be written."""
        return self._number("SELECT count(*) FROM chunks")

    def text_bytes(self) -> tuple[int, int]:
        """Return the bytes of all chunks' texts and titles, and of those without vectors."""
        size = "length(CAST(c.title AS BLOB)) + length(CAST(c.text AS BLOB))"
        every, missing = self._db.execute(
            f"SELECT coalesce(sum({size}), 0), coalesce(sum(CASE WHEN v.chunk IS NULL THEN {size} END), 0) "
            "FROM chunks c LEFT JOIN vectors v ON v.chunk = c.number"
        ).fetchone()
        return every, missing

    def some_texts(self, count: int) -> list[str]:
        """Return the texts of some chunks, spread over all."""
        step = max(self.chunk_count() // count, 1)
        found = self._db.execute("SELECT text FROM chunks WHERE number % ? = 0 LIMIT ?", (step, count))
        return [text for (text,) in found]

    def unembedded(self, unit: int) -> list[JournalRow]:
        """Return a unit's chunks without vectors."""
        found = self._db.execute(
            f"SELECT {ROW} FROM units u JOIN chunks c USING (document) "
            "LEFT JOIN vectors v ON v.chunk = c.number WHERE u.unit = ? AND v.chunk IS NULL "
            "ORDER BY u.position, c.part",
            (unit,),
        )
        return [JournalRow(*row) for row in found]

    def add_vectors(self, rows: Sequence[JournalRow], vectors: np.ndarray) -> None:
        """Store the vectors (len(rows), dimension) of some chunks, all or none."""
        pairs = (
            (row.number, vector.astype("<f4").tobytes()) for row, vector in zip(rows, vectors, strict=True)
        )
        with self.transaction():
            self._db.executemany("INSERT INTO vectors VALUES (?, ?)", pairs)

    def embedded(self, unit: int) -> tuple[list[JournalRow], np.ndarray]:
        """Return a unit's chunks with their vectors."""
        found = self._db.execute(
            f"SELECT {ROW}, v.vector FROM units u JOIN chunks c USING (document) "
            "JOIN vectors v ON v.chunk = c.number WHERE u.unit = ? ORDER BY u.position, c.part",
            (unit,),
        ).fetchall()
        rows = [JournalRow(*row[:-1]) for row in found]
        return rows, np.stack([np.frombuffer(row[-1], "<f4") for row in found])

    def vector_count(self) -> int:
        """Return how many chunks are embedded."""
        return self._number("SELECT count(*) FROM vectors")

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])
