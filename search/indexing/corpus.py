"""Reading a corpus: JSON lines, parquet, a folder of texts or a Chroma, one document at a time.

    for number, document in Corpus("corpus.jsonl").read(): ...

A record is `{"id"?, "title"?, "text"}` or, as in Search-R1's corpora, `{"id"?, "contents"}` with the title on
the first line of `contents`. In a folder of texts each .txt, .md or .markdown file is a document, at any
depth, except hidden ones: its id is the path below the folder, its title the first Markdown heading or else
the file's name. A corpus is read twice: `search.indexing.journal` surveys every record before an embedder is
loaded, so that a bad line near the end costs seconds, and then the documents are split.
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

from ops.errors import UserError
from ops.files import open_regular
from search.place import DATABASE_FILE, ChromaPlace, connect
from search.store import collection_names, iter_documents

COLUMNS = ("id", "title", "text", "contents")
PARQUET_BATCH = 1024
TEXT_SUFFIXES = (".txt", ".md", ".markdown")
KINDS = (
    "a corpus is a .jsonl file, a .parquet file, a folder of .txt and .md files, a Chroma folder or the "
    "address of a Chroma server"
)
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(?=[^ \t])")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")


class CorpusError(UserError):
    """A corpus that cannot be indexed: the file, the line or row, and what is wrong there."""


@dataclass(frozen=True)
class Document:
    """One document of a corpus."""

    id: str
    title: str
    text: str

    @classmethod
    def from_record(cls, record: Any) -> "Document":
        """Check a record and return its document, with a hash for an id if it has none; raises ValueError."""
        if not isinstance(record, Mapping):
            raise ValueError("not an object with 'text'")
        title, text = record.get("title"), record.get("text")
        if text is None and isinstance(contents := record.get("contents"), str):
            first, _, rest = contents.partition("\n")
            first = first.strip().strip('"')
            has_title = bool(rest.strip()) and title in (None, first or None)
            title, text = (first, rest) if has_title else (title, contents)
        if not isinstance(text, str) or not text.strip():
            raise ValueError("no text (a non-empty string under 'text' or 'contents')")
        if title is not None and not isinstance(title, str):
            raise ValueError(f"the title is not a string: {title!r}")
        title = title or ""
        key = record.get("id")
        f"{key}{title}{text}".encode()  # a ValueError for lone surrogates, which no store can hold
        if key is None or key == "":
            key = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:32]
        return cls(str(key), title, text)

    def digest(self) -> bytes:
        """Return a hash of id, title and text (32 bytes)."""
        return hashlib.sha256(json.dumps([self.id, self.title, self.text]).encode()).digest()


@dataclass(frozen=True)
class Corpus:
    """A corpus at a path or a Chroma's address; `collection` is for a Chroma that holds several.

    A Chroma that this project built gives its chunks, each as a document.
    """

    source: Path | str
    collection: str | None = None

    def place(self, number: int) -> str:
        """Return a description of where a record is, counted from 1."""
        unit = {".jsonl": "line", ".parquet": "row"}.get(Path(self.source).suffix, "document")
        return f"{self.source} {unit} {number}"

    def read(self) -> Iterator[tuple[int, Document]]:
        """Yield each record's number and document; raises CorpusError at the first bad one."""
        try:
            for number, record in self._records():
                try:
                    document = Document.from_record(record)
                except ValueError as error:
                    is_file = Path(self.source).is_file()
                    where = self.place(number) if is_file else f"{self.source} {record['id']}"
                    raise CorpusError(f"{where}: {error}") from error
                yield number, document
        except OSError as error:
            raise _unreadable(error.filename or self.source, error) from error

    def _records(self) -> Iterator[tuple[int, Any]]:
        place = ChromaPlace.parse(self.source)
        path = place.folder
        if path is None or (path / DATABASE_FILE).is_file():
            with connect(place) as client:
                names = [self.collection] if self.collection is not None else collection_names(client)
            if len(names) != 1:
                raise CorpusError(
                    f"{self.source} holds {len(names)} collections ({', '.join(names)}): "
                    "name one (source_collection=…, or --source-collection)"
                )
            for number, (key, title, text) in enumerate(iter_documents(place, names[0]), start=1):
                yield number, {"id": key, "title": title, "text": text}
        elif not path.exists():
            raise CorpusError(f"no corpus at {path}")
        elif path.is_dir():
            yield from enumerate(_read_folder(path), start=1)
        elif path.suffix == ".jsonl":
            with open_regular(path) as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    try:
                        yield number, json.loads(line)
                    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
                        raise CorpusError(f"{self.place(number)} is not JSON: {error}") from error
        elif path.suffix == ".parquet":
            yield from enumerate(_read_parquet(path), start=1)
        else:
            raise CorpusError(f"{path}: {KINDS}")


def _unreadable(path: Path | str, error: OSError) -> CorpusError:
    return CorpusError(
        f"{path} cannot be read ({error.strerror or error}): make it readable, or take it out of the corpus"
    )


def _read_parquet(path: Path) -> Iterator[Any]:
    number, rows = 0, "the beginning"
    try:
        with open_regular(path) as stream, pq.ParquetFile(stream) as file:
            present = file.schema_arrow.names
            if "text" not in present and "contents" not in present:
                raise CorpusError(
                    f"{path} has neither a column 'text' nor 'contents', only {', '.join(present)}"
                )
            columns = [name for name in COLUMNS if name in present]
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=columns):
                rows = f"rows {number + 1} to {number + len(batch)}"
                batch.validate(full=True)  # texts must be UTF-8
                number += len(batch)
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise CorpusError(f"{path} is not a parquet file or is damaged ({rows}): {error}") from error


def _read_folder(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the record of each text file below a folder, sorted by path within each folder."""
    found = False
    for path in _walk(folder):
        found = True
        try:
            with open_regular(path) as stream:
                text = stream.read().decode("utf-8-sig")
        except OSError as error:  # a dangling link, no permission, a failing disk
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
    # Only the names on the way to one folder are in memory, not the whole tree's. No recursion: folders can
    # be deeper than Python's calls.
    way = [iter([(folder, True)])]
    while way:
        path, is_folder = next(way[-1], (None, False))
        if path is None:
            way.pop()
        elif is_folder:
            way.append(iter(_entries(path)))
        elif path.suffix.lower() in TEXT_SUFFIXES:
            yield path


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    """The visible entries of a folder, sorted by name, and whether each is a folder."""
    with os.scandir(folder) as scanned:
        found = ((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in scanned)
        return sorted((path, is_folder) for path, is_folder in found if not path.name.startswith("."))


def _title_of(path: Path, text: str) -> tuple[str, str]:
    """Return title and text of a file; a heading on the first line is removed from the text."""
    if path.suffix.lower() == ".txt":
        return path.stem, text
    fenced, blank = False, True
    for line in re.finditer(r"[^\n]*\n?", text):
        content = line[0].rstrip("\r\n")
        if _FENCE.match(content):
            fenced = not fenced
        elif not fenced and (heading := _HEADING.match(content)):
            rest = text[line.end() :]
            title = content[heading.end() :].rstrip(" \t")
            closed = title.rstrip("#")  # "# Title ##"
            title = closed.rstrip(" \t") if closed.endswith((" ", "\t")) else title
            return title, rest.lstrip("\r\n") if blank and rest.strip() else text
        blank = blank and not content.strip()
    return path.stem, text
