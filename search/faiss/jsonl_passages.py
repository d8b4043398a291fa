"""The passages of a JSONL file by line number, in constant memory.

The lines' offsets stay in `.NAME.lines` (8 bytes a line) until the JSONL's size or time changes.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from drzero.ops.files import atomic_path
from search.errors import StoreError, StoreNotReady
from search.sources.document import Fields, Origin
from search.wire import Passage, make_passage

_BLOCK = 1 << 24
_OFFSET = np.dtype("<u8")
_HEAD = 2  # Numbers before the offsets: the JSONL's size in bytes and its time in nanoseconds
_FIELDS = Fields()


class StoredPassage(NamedTuple):
    """A line. `document` is its whole document's id. `contents` is None if title and text stand apart."""

    id: str
    title: str
    text: str
    contents: str | None
    document: str

    def to_wire(self) -> Passage:
        """Return a service's answer, with `contents` unchanged for clients that read it."""
        passage = make_passage(self.id, self.title, self.text)
        return passage if self.contents is None else {**passage, "contents": self.contents}


class JsonlPassages:
    """An open file of passages. Several threads may read it. Raises StoreNotReady or StoreError."""

    def __init__(self, path: Path, lines_folder: Path | None = None) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise StoreNotReady(f"no passages at {path} ({error.strerror})") from error
        try:
            self._starts = _starts(path, self._file, lines_folder)
            for row in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else ():
                self[row]
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> StoredPassage:
        start, end = map(int, self._starts[row : row + 2])
        return self._parse(os.pread(self._file.fileno(), end - start, start), row)

    def __iter__(self) -> Iterator[StoredPassage]:
        with self.path.open("rb") as lines:
            for row, line in enumerate(lines):
                yield self._parse(line, row)

    def _parse(self, line: bytes, row: int) -> StoredPassage:
        origin = Origin(str(self.path), "line", row + 1)
        try:
            record = msgspec.json.decode(line)
            document = _FIELDS.document(record, origin)
        except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
            raise StoreError(
                f"{origin} is no passage ({error}): the corpus of an index has a line of JSON for each "
                'row, {"id": …, "contents": "title\\ntext"}'
            ) from error
        # As in `Fields`: a `text` takes precedence over `contents`.
        contents = None if record.get("text") is not None else record["contents"]
        key = str(record.get("id", row))
        return StoredPassage(key, document.title, document.text, contents, str(record.get("doc_id", key)))


def _starts(path: Path, file: BinaryIO, lines_folder: Path | None) -> np.ndarray:
    """Return where each line begins, and the end of the last, from the offsets' file, made if necessary."""
    state = os.fstat(file.fileno())
    mark = [state.st_size, state.st_mtime_ns]
    places = [path.with_name(f".{path.name}.lines")]
    if lines_folder is not None:
        name = f"{path.name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}.lines"
        places.append(lines_folder / name)
    for place in places:
        if place.is_file() and place.stat().st_size >= (_HEAD + 1) * _OFFSET.itemsize:
            stored = np.memmap(place, dtype=_OFFSET, mode="r")
            if stored[:_HEAD].tolist() == mark and stored[-1] == state.st_size:
                return stored[_HEAD:]
    refusals = []
    for place in places:
        try:
            with atomic_path(place) as temporary, temporary.open("wb") as lines:
                np.array(mark, _OFFSET).tofile(lines)
                for some in _line_starts(file):
                    some.tofile(lines)
            return np.memmap(place, dtype=_OFFSET, mode="r")[_HEAD:]
        except OSError as error:
            refusals.append(f"{place.parent} ({error.strerror})")
    raise StoreError(
        f"where the lines of {path} begin can be written to none of {', '.join(refusals)}: make one "
        "writable, with 8 bytes of room for each line"
    )


def _line_starts(file: BinaryIO) -> Iterator[np.ndarray]:
    """Yield the offsets at which lines begin, in blocks, and finally the end's."""
    file.seek(0)
    at, last = 0, b"\n"
    yield np.zeros(1, _OFFSET)
    while block := file.read(_BLOCK):
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 0x0A).astype(_OFFSET)
        yield ends + np.uint64(at + 1)
        at, last = at + len(block), block[-1:]
    if last != b"\n":  # else the end has been yielded
        yield np.array([at], _OFFSET)
