"""Find damage in a Chroma folder before it is served: Chroma serves flipped bits, or crashes on them.

Reads Chroma's private tables and vector files, as chromadb 1.5 writes them (`KNOWN_CHROMADB`). On one core,
60,000 chunks in a database of 300 MB take 1 s, a gigabyte of vector files 0.6 s.
"""

import hashlib
import json
import sqlite3
import struct
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import msgspec
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

from drzero.ops.files import atomic_write
from search.errors import StoreError, StoreNotReady
from search.stored_index import DATABASE_FILE

KNOWN_CHROMADB = "1.5"  # The chromadb release whose private files this module reads
RECORD = "drzero-content.json"
_ROWS = 1000
_decode = msgspec.json.Decoder(dict[str, dict[str, str]]).decode

# Chroma's fork of hnswlib: format, offset of the first level, capacity, elements, bytes per element, two
# offsets, top level, entry point, links per element above the first level and on it, links asked for, level
# factor, search width while building.
_VECTOR_HEADER = struct.Struct("<iQQQQQQiIQQQdQ")
_VECTOR_FORMAT = 1
_VECTOR_FILES = ("header.bin", "data_level0.bin", "length.bin", "link_lists.bin", "index_metadata.pickle")

_COLLECTION = """
SELECT c.id FROM collections c JOIN databases d ON d.id = c.database_id
WHERE c.name = ? AND d.name = ? AND d.tenant_id = ?
"""
_METADATA = """
SELECT key, str_value, int_value, float_value, bool_value FROM collection_metadata
WHERE collection_id = ? ORDER BY key
"""
# The plus makes SQLite read rows in the order in which they were written, not in the index's.
_TEXTS = """
SELECT e.embedding_id, m.key, m.string_value FROM embeddings e JOIN embedding_metadata m ON m.id = e.id
WHERE +e.segment_id = ? AND m.key IN ('chroma:document', 'title') ORDER BY e.id, m.key
"""
# Rows up to `max_seq_id` are in the vector files, and Chroma may remove them at any time.
_QUEUED = """
SELECT seq_id, operation, id, vector, encoding, metadata FROM embeddings_queue
WHERE topic LIKE '%/' || ?
AND seq_id > coalesce((SELECT seq_id FROM max_seq_id WHERE segment_id = ?), 0) ORDER BY seq_id
"""


def record_content(folder: Path, collection: str) -> None:
    """Add a complete collection's hashes to the folder's record. Raises StoreError."""
    record = _read_record(folder) | {collection: _hash_content(folder, collection)}
    atomic_write(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")


def check_content(folder: Path, collection: str) -> bool:
    """Return whether hashes are recorded. Raises StoreError, naming the files, if any differs."""
    recorded = _read_record(folder).get(collection)
    if recorded is None:
        return False
    found = _hash_content(folder, collection)
    if changed := sorted({name for name, _ in recorded.items() ^ found.items()}):
        raise _damaged(folder, collection, f"not as published: {', '.join(changed)}")
    return True


def check_files(folder: Path) -> None:
    """Raise StoreNotReady if the database or a collection's vector files are missing or cut off."""
    _check_version()

    def damaged(what: str) -> StoreNotReady:
        return StoreNotReady(f"the Chroma folder {folder} is damaged: {what}. Build it again")

    path = folder / DATABASE_FILE
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
        raise damaged(f"{path.name} is no SQLite database")
    # An interrupted write leaves a journal, and SQLite rolls it back when it opens the file.
    if not path.with_name(f"{path.name}-journal").exists():
        # https://www.sqlite.org/fileformat2.html#the_database_header: bytes per page, pages, change counters
        page_size = int.from_bytes(head[16:18])
        wanted = int.from_bytes(head[28:32]) * (65536 if page_size == 1 else page_size)
        if head[24:28] == head[92:96] and (size := path.stat().st_size) < wanted:
            raise damaged(f"{path.name} has {size} of its {wanted} bytes")
    for vectors in sorted({path.parent for path in folder.glob("*/*.bin")}):
        if fault := _vector_fault(vectors):
            raise damaged(fault)


def _vector_fault(vectors: Path) -> str | None:
    missing = [name for name in _VECTOR_FILES if not (vectors / name).is_file()]
    if "header.bin" in missing:
        return f"{vectors.name} lacks header.bin"
    header = (vectors / "header.bin").read_bytes()
    if len(header) != _VECTOR_HEADER.size:
        return f"{vectors.name}/header.bin has {len(header)} of its {_VECTOR_HEADER.size} bytes"
    form, _, _, elements, element_bytes, _, _, _, _, links, *_ = _VECTOR_HEADER.unpack(header)
    if form != _VECTOR_FORMAT:
        raise StoreError(
            f"{vectors}/header.bin is in format {form}, and chromadb {KNOWN_CHROMADB} writes format "
            f"{_VECTOR_FORMAT}: another chromadb built this folder, or the file is damaged. Build it again"
        )
    if elements == 0:  # Chroma keeps few vectors in its database
        return None
    if missing:
        return f"{vectors.name} lacks {', '.join(missing)}"
    for name, wanted in (("data_level0.bin", elements * element_bytes), ("length.bin", elements * 4)):
        if (size := (vectors / name).stat().st_size) < wanted:
            return f"{vectors.name}/{name} has {size} of its {wanted} bytes"
    # Per element the size of its links above the first level, then the links, one block per level.
    above = (vectors / "link_lists.bin").stat().st_size - elements * 4
    return f"{vectors.name}/link_lists.bin is cut off" if above < 0 or above % (links * 4 + 4) else None


def _check_version() -> None:
    installed = version("chromadb")
    if not installed.startswith(f"{KNOWN_CHROMADB}."):
        raise StoreError(
            f"chromadb {installed} is installed, and search/chroma/content.py reads the private files of "
            f"{KNOWN_CHROMADB}: install chromadb {KNOWN_CHROMADB}, or adapt that file"
        )


def _read_record(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / RECORD
    try:
        return _decode(path.read_bytes()) if path.exists() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}): restore or remove it") from error


def _hash_content(folder: Path, collection: str) -> dict[str, str]:
    """Return the sha256 (hex) of each vector file, by its path below the folder, and of the texts."""
    _check_version()
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
                cursor = connection.execute(query, values)
                while rows := cursor.fetchmany(_ROWS):
                    digest.update(repr(rows).encode(errors="surrogatepass"))
            hashes = {f"texts in {DATABASE_FILE}": digest.hexdigest()}
        # Chroma keeps up to a thousand vectors in the database. Without this file it empties the others.
        written = (folder / vectors / "index_metadata.pickle").exists()
        for path in sorted((folder / vectors).glob("*")) if written else ():
            with path.open("rb") as file:
                hashes[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    except (sqlite3.Error, OSError, TypeError, KeyError) as error:  # the last two: rows are missing
        raise _damaged(folder, collection, f"it cannot be read ({type(error).__name__}: {error})") from error
    return hashes


def _damaged(folder: Path, collection: str, what: str) -> StoreError:
    return StoreError(
        f"collection {collection!r} in {folder} is damaged, {what}. Restore the folder from a copy, or index "
        "its corpus again with replace=true (or --replace)"
    )
