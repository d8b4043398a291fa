"""A source's files (a file, a folder at any depth, or a glob), and how to open one.

    for file in files_of("notes/**/*.md", print): file.path, file.kind, file.id

Nothing here is recursive: folders can be deeper than Python's stack.
"""

import codecs
import glob
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
from charset_normalizer import from_bytes

from drzero.ops.files import open_regular

RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".md", ".markdown", ".html", ".htm", ".xhtml", ".rst")
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
KINDS = (
    f"a corpus is a file, a folder or a glob of {', '.join(RECORDS + TEXTS)} files "
    f"(also {', '.join(COMPRESSED)}), a data set of the hub (hf://datasets/OWNER/NAME), a Chroma folder or "
    "the address of a Chroma server"
)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. `id` is its path below the source."""

    path: Path
    id: str

    @property
    def kind(self) -> str:
        """The suffix that decides its reader, or empty."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] in COMPRESSED:
            suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in RECORDS + TEXTS else ""


def is_glob(source: Path | str) -> bool:
    """Whether a source is a pattern, not a file of that very name."""
    return glob.has_magic(str(source)) and not os.path.lexists(source)


def files_of(source: Path | str, left_out: Callable[[Path], object]) -> Iterator[SourceFile]:
    """Yield the files to read, in a fixed order. `left_out` gets unknown kinds in folders."""
    if not is_glob(source):
        yield from _below(Path(source), Path(source), left_out)
        return
    parts = Path(source).parts
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    for found in sorted(glob.iglob(str(source), recursive=True)):
        path = Path(found)
        # `notes/**` also matches folders, whose files it matches anyway.
        if not path.is_dir() or "**" not in parts:
            yield from _below(path, root, left_out)


def _below(path: Path, root: Path, left_out: Callable[[Path], object]) -> Iterator[SourceFile]:
    if not path.is_dir():
        yield SourceFile(path, path.relative_to(root).as_posix() if path != root else path.name)
        return
    for one in _walk(path):
        file = SourceFile(one, one.relative_to(root).as_posix())
        if file.kind:
            yield file
        else:
            left_out(one)


def _walk(folder: Path) -> Iterator[Path]:
    # Only the names on the way to one folder are in memory, not the whole tree's.
    way = [iter([(folder, True)])]
    while way:
        path, is_folder = next(way[-1], (None, False))
        if path is None:
            way.pop()
        elif is_folder:
            way.append(iter(_entries(path)))
        else:
            yield path


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    with os.scandir(folder) as scanned:
        found = ((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in scanned)
        return sorted((path, is_folder) for path, is_folder in found if not path.name.startswith("."))


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a source's file, decompressed. Raises OSError if it is no file or damaged."""
    with open_regular(path) as stream:
        compression = COMPRESSED.get(path.suffix.lower())
        if compression is None:
            yield stream
            return
        with pa.CompressedInputStream(stream, compression) as plain:
            # A buffer, because Arrow's stream has no lines.
            yield io.BufferedReader(_Raw(plain))


class _Raw(io.RawIOBase):
    """Arrow's stream as Python's."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_text(path: Path, used: "Callable[[Encoding], object]") -> Iterator[IO[str]]:
    """Open a text file in its encoding, which `used` gets. Only `\\n` ends a line. Raises ValueError."""
    with open_bytes(path) as stream:
        encoding = encoding_of(stream)
    used(encoding)
    with open_bytes(path) as stream, io.TextIOWrapper(stream, *encoding, newline="\n") as text:
        # `utf-8-sig` and `utf-16` remove the byte order mark. Plain `utf-8` keeps it.
        yield text


def read_text(path: Path, used: "Callable[[Encoding], object]") -> str:
    """Read a whole text file. Raises ValueError for binary data."""
    with open_bytes(path) as stream:
        raw = stream.read()
    encoding = encoding_of(raw.splitlines(keepends=True))
    used(encoding)
    return raw.decode(*encoding)


# --- encodings: UTF-8, or what the byte order mark says, else charset-normalizer's guess ---

UTF8 = "utf-8"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 64 * 1024  # Bytes of lines that are not UTF-8, for the guess


class Encoding(NamedTuple):
    """How to decode: arguments of `bytes.decode`."""

    name: str
    errors: str = "strict"


def encoding_of(lines: Iterable[bytes]) -> Encoding:
    """Return the encoding of these lines. Raises ValueError for binary data."""
    valid = first = 0
    sample = bytearray()
    for number, line in enumerate(lines):
        if number == 0:
            for mark, name in _MARKS:
                if line.startswith(mark):
                    return Encoding(name)
        if b"\0" in line:
            raise ValueError(
                "a binary file? It has zero bytes, as has UTF-16 without a mark: save it as UTF-8"
            )
        if line.isascii():
            continue
        try:
            line.decode()
            valid += 1
        except UnicodeDecodeError:
            first += 1
            if len(sample) < _SAMPLE:
                sample += line[:_SAMPLE]
    if not sample:
        return Encoding(UTF8)
    return Encoding(UTF8, "surrogateescape") if valid > first else _guess(bytes(sample))


def _guess(sample: bytes) -> Encoding:
    # Unlabelled Western text is usually Windows' Latin. With few letters, the first guess is arbitrary.
    found = from_bytes(sample, cp_isolation=["cp1252"]).best() or from_bytes(sample).best()
    if found is None:
        raise ValueError("no text in any known encoding: a binary file?")
    return Encoding(found.encoding)
