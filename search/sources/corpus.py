"""A whole source: its documents one at a time, and all its faults."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from search.chroma.location import ChromaPlace, connect
from search.chroma.store import collection_names, iter_documents
from search.sources.document import CorpusError, Document, Fault, Faults, Fields, Origin
from search.sources.files import KINDS, RECORDS, Hints, SourceFile, codec_of, files_of, is_glob, shown
from search.sources.hub import fetch_data_set, is_data_set
from search.sources.records import READERS, Bad
from search.sources.text_formats import read_document
from search.stored_index import DATABASE_FILE

OnBad = Literal["stop", "skip"]
_EXAMPLES = 5


@dataclass
class Some:
    """A count, and the beginnings of a few examples."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        """Count one."""
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(" ".join(example.split())[:200])


@dataclass
class Reading:
    """What one pass over a source met besides documents."""

    files: int = 0
    faults: Faults = field(default_factory=Faults)
    left_out: dict[str, "Some"] = field(default_factory=dict)  # files of unknown formats, by suffix
    formats: dict[tuple[str, str], str] = field(default_factory=dict)  # by a page's file name and title
    notes: dict[str, "Some"] = field(default_factory=dict)  # how files were read, such as an encoding

    def lines(self) -> Iterator[str]:
        """Yield notes for the user, one per line."""
        for suffix, some in sorted(self.left_out.items()):
            yield f"{some.count} {suffix} left out, which nothing here reads (such as {some.examples[0]})"
        for note, some in sorted(self.notes.items()):
            more = f", and {some.count - 1} more" if some.count > 1 else ""
            yield f"{some.examples[0]}{more}: {note}"
        if self.faults:
            yield f"{self.faults.total:,} faulty records or files skipped:"
            yield from (f"  {line}" for line in islice(self.faults.lines(), 20))

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "files": self.files,
            "skipped": self.faults.to_json(),
            "left_out": {suffix: vars(some) for suffix, some in self.left_out.items()},
            "notes": {note: vars(some) for note, some in self.notes.items()},
        }


@dataclass(frozen=True)
class Corpus:
    """The documents of a source. Faults refuse the corpus if `on_bad` is `stop`, else they are left out."""

    source: Path | str
    collection: str | None = None
    fields: Fields = field(default_factory=Fields)
    on_bad: OnBad = "stop"
    encoding: str | None = None  # of files that are not UTF-8 and declare none

    def __post_init__(self) -> None:
        """Raise CorpusError for an encoding that Python lacks."""
        if self.encoding and not codec_of(self.encoding):
            raise CorpusError(f"encoding={self.encoding} is no encoding: write a name as cp1250 or iso8859-2")

    def __str__(self) -> str:
        return shown(self.source)

    def read(self, reading: Reading | None = None) -> Iterator[tuple[int, Document]]:
        """Yield the documents, numbered alike in each pass, and fill `reading`. Raises CorpusError."""
        reading = Reading() if reading is None else reading
        for number, found in enumerate(self._all(reading), start=1):
            if isinstance(found, Fault):
                reading.faults.add(found)
            else:
                yield number, found

    def check(self, reading: Reading) -> None:
        """Raise CorpusError with all faults of a pass, unless they are to be skipped."""
        if reading.faults and self.on_bad == "stop":
            raise CorpusError(reading.faults.message(self))

    def _all(self, reading: Reading) -> Iterator[Document | Fault]:
        if is_data_set(self.source):
            yield from self._of_files(fetch_data_set(str(self.source)), reading)
            return
        place = ChromaPlace.parse(self.source)
        path = place.folder
        if path is None or (path / DATABASE_FILE).is_file():
            yield from self._of_chroma(place)
        elif not is_there(path):
            raise CorpusError(f"no corpus at {shown(path)}")
        else:
            yield from self._of_files(path, reading)

    def _of_chroma(self, place: ChromaPlace) -> Iterator[Document | Fault]:
        with connect(place) as client:
            names = [self.collection] if self.collection is not None else collection_names(client)
        if len(names) != 1:
            raise CorpusError(
                f"{self.source} holds {len(names)} collections ({', '.join(names)}): "
                "name one (source_collection=…, or --source-collection)"
            )
        for key, title, text in iter_documents(place, names[0]):
            origin = Origin(f"{self.source} {key}")
            yield _document(Fields(), {"id": key, "title": title, "text": text}, origin)

    def _of_files(self, source: Path, reading: Reading) -> Iterator[Document | Fault]:
        def left_out(path: Path) -> None:
            suffix = path.suffix.lower() or "files without a suffix"
            reading.left_out.setdefault(suffix, Some()).add(shown(path))

        for file in files_of(source, left_out):
            reading.files += 1
            try:
                yield from self._of_file(file, reading)
            except (OSError, pa.ArrowException) as error:
                why = getattr(error, "strerror", None) or str(error)
                yield Fault(
                    Origin(shown(file.path)), f"cannot be read ({why}): make it readable, or take it out"
                )
            except ValueError as error:
                yield Fault(Origin(shown(file.path)), str(error))

    def _of_file(self, file: SourceFile, reading: Reading) -> Iterator[Document | Fault]:
        def tell(note: str) -> None:
            reading.notes.setdefault(note, Some()).add(name)

        name, hints = shown(file.path), Hints(self.encoding, tell)
        if not file.kind:
            raise ValueError(KINDS)
        if file.kind not in RECORDS:
            title, text, markdown = read_document(file, hints)
            page = (file.path.name.partition(".")[0], title.casefold())
            if reading.formats.setdefault(page, file.kind) != file.kind:
                tell("is here in another format too: leave one out, else its questions come twice")
            record = {"id": file.id, "title": title, "text": text, "markdown": markdown}
            yield _document(Fields(), record, Origin(name))
            return
        unit, read = READERS[file.kind]
        for number, record in read(file.path, hints):
            origin = Origin(name, unit, number)
            if isinstance(record, Bad):
                yield Fault(origin, record.why)
            else:
                yield _document(self.fields, record, origin)


def is_there(source: Path | str) -> bool:
    """Whether a source's files exist. Always True for hubs and servers, which only reading can tell."""
    if is_data_set(source) or ChromaPlace.parse(source).folder is None:
        return True
    if is_glob(source):
        return next(glob.iglob(str(source), recursive=True), None) is not None
    return os.path.lexists(source)


def _document(fields: Fields, record: Any, origin: Origin) -> Document | Fault:
    try:
        return fields.document(record, origin)
    except ValueError as error:
        return Fault(origin, str(error))
