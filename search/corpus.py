"""Reading a corpus: JSON lines, parquet, a folder of texts or a Chroma, one document after the other.

A record is `{"id"?, "title"?, "text"}` or, as Search-R1's corpora have it, `{"id"?, "contents"}` with the
title on the first line of `contents`. In a folder of texts each .txt, .md or .markdown file is a document,
at any depth, hidden ones left out: its id is the path below the folder, its title the first Markdown
heading or else the file's name. A corpus is read twice: `search.ledger` surveys every record before an
embedder is loaded, so that a bad line near the end costs seconds, and then the index is fed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search.store import DATABASE_FILE, ChromaPlace, collection_names, connect, iter_documents

COLUMNS = ("id", "title", "text", "contents")
PARQUET_BATCH = 1024
TEXT_SUFFIXES = (".txt", ".md", ".markdown")
KINDS = (
    "a corpus is a .jsonl file, a .parquet file, a folder of .txt and .md files, a Chroma folder or the "
    "address of a Chroma server"
)
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")


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
    """Where a corpus lies: a path or a Chroma's address; `collection` is for a Chroma that holds several.

    A Chroma that this project built gives its chunks, each as a document.
    """

    source: Path | str
    collection: str | None = None

    def place(self, number: int) -> str:
        """Return the words for a record's place, counted from 1."""
        unit = {".jsonl": "line", ".parquet": "row"}.get(Path(self.source).suffix, "document")
        return f"{self.source} {unit} {number}"

    def read(self) -> Iterator[tuple[int, Document]]:
        """Yield each record's number and document; raises CorpusError at the first bad one."""
        try:
            yield from self._read()
        except OSError as error:
            raise _unreadable(error.filename or self.source, error) from error

    def _read(self) -> Iterator[tuple[int, Document]]:
        for number, record in self._records():
            try:
                document = _parse(record)
            except ValueError as error:
                where = self.place(number) if Path(self.source).is_file() else f"{self.source} {record['id']}"
                raise CorpusError(f"{where}: {error}") from error
            yield number, document

    def _records(self) -> Iterator[tuple[int, Any]]:
        place = ChromaPlace.parse(self.source)
        path = place.folder
        if path is None or (path / DATABASE_FILE).is_file():
            return self._chroma(place)
        if not path.exists():
            raise CorpusError(f"no corpus at {path}")
        if path.is_dir():
            return enumerate(_read_folder(path), start=1)
        if path.suffix == ".jsonl":
            return self._json_lines(path)
        if path.suffix == ".parquet":
            return self._parquet(path)
        raise CorpusError(f"{path}: {KINDS}")

    def _json_lines(self, path: Path) -> Iterator[tuple[int, Any]]:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    raise CorpusError(f"{self.place(number)} is not JSON: {error}") from error

    def _parquet(self, path: Path) -> Iterator[tuple[int, Any]]:
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise CorpusError(f"{path} is not a parquet file: {error}") from error
        with file:
            present = file.schema_arrow.names
            if "text" not in present and "contents" not in present:
                raise CorpusError(
                    f"{path} has neither a column 'text' nor 'contents', only {', '.join(present)}"
                )
            columns = [name for name in COLUMNS if name in present]
            batches = file.iter_batches(batch_size=PARQUET_BATCH, columns=columns)
            yield from enumerate((record for batch in batches for record in batch.to_pylist()), start=1)

    def _chroma(self, place: ChromaPlace) -> Iterator[tuple[int, Any]]:
        documents = iter_documents(place, self._source_collection(place))
        for number, (key, title, text) in enumerate(documents, start=1):
            yield number, {"id": key, "title": title, "text": text}

    def _source_collection(self, place: ChromaPlace) -> str:
        if self.collection is not None:
            return self.collection
        with connect(place) as client:
            names = collection_names(client)
        if len(names) != 1:
            raise CorpusError(
                f"{self.source} holds {len(names)} collections ({', '.join(names)}): "
                "name one (source_collection=…, or --source-collection)"
            )
        return names[0]


def _unreadable(path: Path | str, error: OSError) -> CorpusError:
    return CorpusError(
        f"{path} cannot be read ({error.strerror or error}): make it readable, or take it out of the corpus"
    )


def _read_folder(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the record of each text file below a folder, sorted by path within each folder."""
    found = False
    for path in _walk(folder):
        found = True
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as error:  # a dangling link, no permission, a disk that fails
            raise _unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{path} is not UTF-8 (byte {error.object[error.start]:#x} at {error.start}): convert it, or "
                "take it out of the folder"
            ) from error
        title, text = _title_of(path, text)
        yield {"id": path.relative_to(folder).as_posix(), "title": title, "text": text}
    if not found:
        raise CorpusError(f"{folder} holds no documents ({', '.join(TEXT_SUFFIXES)}): {KINDS}")


def _walk(folder: Path) -> Iterator[Path]:
    # One folder's names at a time are in memory, not the whole tree's.
    with os.scandir(folder) as scanned:
        entries = sorted(
            (entry.name, entry.is_dir(follow_symlinks=False))
            for entry in scanned
            if not entry.name.startswith(".")
        )
    for name, is_folder in entries:
        if is_folder:
            yield from _walk(folder / name)
        elif Path(name).suffix.lower() in TEXT_SUFFIXES:
            yield folder / name


def _title_of(path: Path, text: str) -> tuple[str, str]:
    """Return title and text of a file; a heading that opens the file is not in the text again."""
    if path.suffix.lower() == ".txt":
        return path.stem, text
    fenced, blank = False, True
    for line in re.finditer(r"[^\n]*\n?", text):
        content = line[0].rstrip("\r\n")
        if _FENCE.match(content):
            fenced = not fenced
        elif not fenced and (heading := _HEADING.match(content)):
            rest = text[line.end() :]
            return heading[1], rest.lstrip("\r\n") if blank and rest.strip() else text
        blank = blank and not content.strip()
    return path.stem, text


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
