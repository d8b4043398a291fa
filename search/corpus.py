"""Reading a corpus: JSON lines, parquet or an existing Chroma folder, one document after the other.

A record is `{"id"?, "title"?, "text"}` or, as Search-R1's corpora have it, `{"id"?, "contents"}` with the
title on the first line of `contents`. A corpus is read twice: `survey` checks every record before an embedder
is loaded, so that a bad line near the end costs seconds, and then `read_kept` feeds the index.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search.store import collection_names, connect, iter_documents

COLUMNS = ("id", "title", "text", "contents")
PARQUET_BATCH = 1024


class CorpusError(Exception):
    """A corpus that cannot be indexed: the file, the line or row, and what is wrong there."""


@dataclass(frozen=True)
class Document:
    """One document of a corpus."""

    id: str
    title: str
    text: str

    def digest(self) -> bytes:
        """Return a hash of id, title and text (32 bytes)."""
        return hashlib.sha256(json.dumps([self.id, self.title, self.text]).encode()).digest()


@dataclass(frozen=True)
class Corpus:
    """Where a corpus lies; `collection` is needed only for a Chroma folder that holds several."""

    source: Path
    collection: str | None = None

    def place(self, number: int) -> str:
        """Return the words for a record's place, counted from 1."""
        unit = {".jsonl": "line", ".parquet": "row"}.get(self.source.suffix, "document")
        return f"{self.source} {unit} {number}"

    def read(self) -> Iterator[tuple[int, Document]]:
        """Yield each record's number and document; raises CorpusError at the first bad one."""
        if not self.source.exists():
            raise CorpusError(f"no corpus at {self.source}")
        if self.source.is_dir():
            records = self._chroma()
        elif self.source.suffix == ".jsonl":
            records = self._json_lines()
        elif self.source.suffix == ".parquet":
            records = self._parquet()
        else:
            raise CorpusError(f"{self.source}: a corpus is a .jsonl file, a .parquet file or a Chroma folder")
        for number, record in records:
            yield number, self._document(number, record)

    def _json_lines(self) -> Iterator[tuple[int, Any]]:
        with self.source.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    raise CorpusError(f"{self.place(number)} is not JSON: {error}") from error

    def _parquet(self) -> Iterator[tuple[int, Any]]:
        try:
            file = pq.ParquetFile(self.source)
        except pa.ArrowInvalid as error:
            raise CorpusError(f"{self.source} is not a parquet file: {error}") from error
        with file:
            present = file.schema_arrow.names
            if "text" not in present and "contents" not in present:
                raise CorpusError(
                    f"{self.source} has neither a column 'text' nor 'contents', only {', '.join(present)}"
                )
            columns = [name for name in COLUMNS if name in present]
            batches = file.iter_batches(batch_size=PARQUET_BATCH, columns=columns)
            yield from enumerate((record for batch in batches for record in batch.to_pylist()), start=1)

    def _chroma(self) -> Iterator[tuple[int, Any]]:
        for number, (key, title, text) in enumerate(
            iter_documents(self.source, self._source_collection()), start=1
        ):
            yield number, {"id": key, "title": title, "text": text}

    def _source_collection(self) -> str:
        if self.collection is not None:
            return self.collection
        with connect(self.source) as client:
            names = collection_names(client)
        if len(names) != 1:
            raise CorpusError(
                f"{self.source} holds {len(names)} collections ({', '.join(names)}): "
                "name one (source_collection=…, or --source-collection)"
            )
        return names[0]

    def _document(self, number: int, record: Any) -> Document:
        try:
            return _parse(record)
        except ValueError as error:
            raise CorpusError(f"{self.place(number)}: {error}") from error


def _parse(record: Any) -> Document:
    if not isinstance(record, Mapping):
        raise ValueError("not an object with 'text'")
    title, text = record.get("title"), record.get("text")
    if text is None and isinstance(record.get("contents"), str):
        title, text = _split_contents(record["contents"], title)
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text (a non-empty string under 'text' or 'contents')")
    if title is not None and not isinstance(title, str):
        raise ValueError(f"the title is not a string: {title!r}")
    title = title or ""
    key = record.get("id")
    f"{key}{title}{text}".encode()  # lone surrogates, which no store can hold, are a ValueError too
    if key is None or key == "":
        key = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:32]
    return Document(str(key), title, text)


def _split_contents(contents: str, title: Any) -> tuple[Any, str]:
    first, _, rest = contents.partition("\n")
    if title is None and rest.strip():
        return first.strip().strip('"'), rest
    return title, rest if title and first.strip().strip('"') == title and rest.strip() else contents


@dataclass(frozen=True)
class Survey:
    """A corpus that was read through: `first` is by id the number and hash of a document's first record.

    `version` is the sum of the documents' hashes: the same documents in another order are the same corpus.
    """

    version: str
    duplicates: int
    first: dict[str, tuple[int, bytes]]


def survey(corpus: Corpus) -> Survey:
    """Read a whole corpus; raises CorpusError if it is empty, has a bad record or an id twice."""
    first: dict[str, tuple[int, bytes]] = {}
    total = duplicates = 0
    for number, document in corpus.read():
        digest = document.digest()
        earlier = first.setdefault(document.id, (number, digest))
        if earlier[0] == number:
            total += int.from_bytes(digest)
        elif earlier[1] == digest:
            duplicates += 1
        else:
            raise CorpusError(
                f"{corpus.place(number)} has the id {document.id!r} of {corpus.place(earlier[0])}, "
                "but another text or title"
            )
    if not first:
        raise CorpusError(f"{corpus.source} holds no documents")
    return Survey(f"{total % 2**256:064x}", duplicates, first)


def read_kept(corpus: Corpus, surveyed: Survey) -> Iterator[Document]:
    """Yield the surveyed documents, each once; raises CorpusError if the corpus has changed since."""
    left = len(surveyed.first)
    for number, document in corpus.read():
        known = surveyed.first.get(document.id)
        if known is None or known[1] != document.digest():
            raise CorpusError(f"{corpus.place(number)} changed while the corpus was indexed: run it again")
        if known[0] == number:
            left -= 1
            yield document
    if left:
        raise CorpusError(f"{corpus.source} lost {left} documents while it was indexed: run it again")
