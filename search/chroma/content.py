"""The content of a published collection as hashes, next to it: damage is found before it is served.

    record_content(folder, "corpus")        # when the collection is complete
    check_content(folder, "corpus")         # before it is served; raises StoreError

Chroma checks nothing itself: a changed bit in a vector file gives other passages, or a crash of the process.
The hashes are in the folder, in `RECORD`, a set for each collection: a copy of the folder has them too, and
other collections may come and go. They show damage and mistakes, not an attacker, who would write new ones.

Hashed is what a service reads: the vector files as they are, and of Chroma's database, to which every opening
adds a row, this collection's metadata, its texts and titles, and the vectors that are not in the files yet.
The columns are those of chromadb 1.5. On one core, 60,000 chunks in a database of 300 MB take 1 s, a gigabyte
of vector files 0.6 s.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

from drzero.ops.files import atomic_write
from search.chroma.location import DATABASE_FILE, StoreError

RECORD = "drzero-content.json"
_ROWS = 1000
_decode = msgspec.json.Decoder(dict[str, dict[str, str]]).decode

_COLLECTION = """
SELECT c.id FROM collections c JOIN databases d ON d.id = c.database_id
WHERE c.name = ? AND d.name = ? AND d.tenant_id = ?
"""
_METADATA = """
SELECT key, str_value, int_value, float_value, bool_value FROM collection_metadata
WHERE collection_id = ? ORDER BY key
"""
# With the plus, rows are read in the order in which they were written and not in that of the index.
_TEXTS = """
SELECT e.embedding_id, m.key, m.string_value FROM embeddings e JOIN embedding_metadata m ON m.id = e.id
WHERE +e.segment_id = ? AND m.key IN ('chroma:document', 'title') ORDER BY e.id, m.key
"""
# Rows up to `max_seq_id` are in the vector files, and may be removed at any time.
_QUEUED = """
SELECT seq_id, operation, id, vector, encoding, metadata FROM embeddings_queue
WHERE topic LIKE '%/' || ?
AND seq_id > coalesce((SELECT seq_id FROM max_seq_id WHERE segment_id = ?), 0) ORDER BY seq_id
"""


def record_content(folder: Path, collection: str) -> None:
    """Record the hashes of a complete collection; those of the folder's other collections are kept.

    Raises StoreError if the collection cannot be read.
    """
    record = _read_record(folder) | {collection: _hash_content(folder, collection)}
    atomic_write(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")


def check_content(folder: Path, collection: str) -> bool:
    """Whether hashes are recorded; raises StoreError, with what differs, unless the collection has them."""
    recorded = _read_record(folder).get(collection)
    if recorded is None:
        return False
    found = _hash_content(folder, collection)
    if changed := sorted({name for name, _ in recorded.items() ^ found.items()}):
        raise _damaged(folder, collection, f"not as published: {', '.join(changed)}")
    return True


def _read_record(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / RECORD
    try:
        return _decode(path.read_bytes()) if path.exists() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}): restore or remove it") from error


def _hash_content(folder: Path, collection: str) -> dict[str, str]:
    """sha256 (hex) of each vector file, by its path below the folder, and of the database's part."""
    database = f"{(folder / DATABASE_FILE).resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(database, timeout=60, uri=True)) as connection:
            place = (collection, DEFAULT_DATABASE, DEFAULT_TENANT)
            (key,) = connection.execute(_COLLECTION, place).fetchone()
            segments = dict(
                connection.execute("SELECT scope, id FROM segments WHERE collection = ?", (key,)).fetchall()
            )
            vectors, texts = segments["VECTOR"], segments["METADATA"]
            digest = hashlib.sha256()
            for query, values in ((_METADATA, (key,)), (_TEXTS, (texts,)), (_QUEUED, (key, vectors))):
                for rows in _pages(connection.execute(query, values)):
                    digest.update(repr(rows).encode(errors="surrogatepass"))
            hashes = {f"texts in {DATABASE_FILE}": digest.hexdigest()}
        # Of fewer than a thousand chunks Chroma keeps the vectors in the database; without this file it
        # overwrites the others, with nothing in them, whenever it opens them.
        written = (folder / vectors / "index_metadata.pickle").exists()
        for path in sorted((folder / vectors).glob("*")) if written else ():
            with path.open("rb") as file:
                hashes[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    except (sqlite3.Error, OSError, TypeError, KeyError) as error:  # the last two: rows are missing
        raise _damaged(folder, collection, f"it cannot be read ({type(error).__name__}: {error})") from error
    return hashes


def _pages(cursor: sqlite3.Cursor) -> Iterator[list[tuple[object, ...]]]:
    while rows := cursor.fetchmany(_ROWS):
        yield rows


def _damaged(folder: Path, collection: str, what: str) -> StoreError:
    return StoreError(
        f"collection {collection!r} in {folder} is damaged, {what}. Restore the folder from a copy, or index "
        "its corpus again with replace=true (or --replace)"
    )
