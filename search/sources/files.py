"""A source's files (a file, a folder at any depth, or a glob), and how to open one."""

import codecs
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr, NamedTuple, cast

import chardet
import pyarrow as pa
from bs4.dammit import EncodingDetector
from chardet import EncodingEra

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


def shown(name: Path | str) -> str:
    """A path as text that can be written: a byte that is not UTF-8 becomes `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


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
        yield SourceFile(path, shown(path.relative_to(root) if path != root else path.name))
        return
    for one in _walk(path):
        file = SourceFile(one, shown(one.relative_to(root)))
        if file.kind:
            yield file
        else:
            left_out(one)


def _walk(folder: Path) -> Iterator[Path]:
    # Not recursive: folders can be deeper than Python's stack.
    # Only the names on the way to one folder are in memory, not the whole tree's.
    waiting = [(folder, True)]
    while waiting:
        path, is_folder = waiting.pop()
        if is_folder:
            waiting += reversed(_entries(path))
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
            yield io.BufferedReader(cast(io.RawIOBase, plain))


@dataclass(frozen=True)
class Hints:
    """`encoding` of files that are not UTF-8 and declare none (None: guess). `tell` gets notes on a file."""

    encoding: str | None = None
    tell: Callable[[str], object] = lambda note: None


def file_encoding(path: Path, hints: Hints) -> "Encoding":
    """Return the encoding of a text file, which is read to its end. Raises ValueError for binary data."""
    with open_bytes(path) as stream:
        return encoding_of((line for line in lines_of(stream) if line is not None), hints)


@contextmanager
def open_text(path: Path, encoding: "Encoding") -> Iterator[IO[str]]:
    """Open a text file. Only `\\n` ends a line."""
    with open_bytes(path) as stream, io.TextIOWrapper(stream, *encoding, newline="\n") as text:
        # `utf-8-sig` and `utf-16` remove the byte order mark. Plain `utf-8` keeps it.
        yield text


def lines_of(stream: IO[AnyStr]) -> Iterator[AnyStr | None]:
    """Yield the lines, and None for a line of more than `LONGEST_LINE` bytes or characters."""
    while line := stream.readline(LONGEST_LINE + 1):
        yield line if (fits := len(line) <= LONGEST_LINE) else None
        while not fits and line and line[-1] not in ("\n", 10):
            line = stream.readline(LONGEST_LINE)


def read_text(path: Path, hints: Hints) -> str:
    """Read a whole text file. Raises ValueError for binary data, or for too much."""
    with open_bytes(path) as stream:
        raw = stream.read(LONGEST_LINE + 1)
    if len(raw) > LONGEST_LINE:
        raise ValueError(TOO_LONG)
    return raw.decode(*encoding_of(raw.splitlines(keepends=True), hints))


LONGEST_LINE = 256 * 2**20  # bytes or characters of a line, or of a file that is read whole
TOO_LONG = f"longer than {LONGEST_LINE >> 20} MiB: split it (of tables, JSON lines can be of any length)"

# --- encodings: UTF-8, what the file declares, what the user says, or chardet's guess, in this order ---

UTF8 = "utf-8"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 64 * 1024  # Bytes of lines that are not UTF-8, for the guess
_HEAD = 2048  # Bytes that can declare an encoding
_CODING = re.compile(rb"\A(?:[^\n]*\n)?[^\n]*?coding[:=][ \t]*([-\w.]+)")  # Editors' first or second line
# What browsers read under these names.
_WIDER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "windows-874": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "x-gbk": "gb18030",
    "shift_jis": "cp932",
    "x-sjis": "cp932",
    "windows-31j": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
_ERAS = EncodingEra.MODERN_WEB | EncodingEra.LEGACY_ISO
# With few letters other guesses are arbitrary, so Western text needs this share of the best one's confidence.
_WESTERN, _SHARE = "cp1252", 0.66


class Encoding(NamedTuple):
    """How to decode: arguments of `bytes.decode`."""

    name: str
    errors: str = "strict"


def encoding_of(lines: Iterable[bytes], hints: Hints) -> Encoding:
    """Return the encoding of these lines. Raises ValueError for binary data."""
    total = valid = invalid = 0
    head, sample = bytearray(), bytearray()
    for line in lines:
        total += 1
        if not head:
            for mark, name in _MARKS:
                if line.startswith(mark):
                    return Encoding(name)
        if len(head) < _HEAD:
            head += line[:_HEAD]
        if b"\0" in line:
            return _with_zeros(bytes(head), hints)
        if line.isascii():
            continue
        try:
            line.decode()
            valid += 1
        except UnicodeDecodeError:
            invalid += 1
            if len(sample) < _SAMPLE:
                sample += line[:_SAMPLE]
    declared = _declared(bytes(head[:_HEAD]))
    if not sample:
        # Its bytes are ASCII, as few encodings' are.
        return Encoding(declared if declared.startswith("iso2022") and not valid else UTF8)
    if valid > invalid:
        return Encoding(UTF8, "surrogateescape")
    for name, why in ((declared, "as declared"), (hints.encoding or "", "as encoding= says")):
        if name and _fits(bytes(sample), name):
            hints.tell(f"read as {name}, {why}")
            return Encoding(name, "surrogateescape")
    if guess := _guess(bytes(sample), hints):
        return guess
    if 2 * invalid > total:
        raise ValueError("no text in any known encoding: a binary file?")
    return Encoding(UTF8, "surrogateescape")  # a few spoiled lines


def _with_zeros(head: bytes, hints: Hints) -> Encoding:
    """UTF-16 without a mark, in which every other byte of most scripts is zero. Raises ValueError."""
    guess = chardet.detect(head)["encoding"] if 4 * head.count(0) > len(head) else None
    name = codec_of((hints.encoding or guess or "").lower())
    if not name.startswith(("utf-16", "utf-32")):
        raise ValueError("a binary file? It has zero bytes. If it is UTF-16, set encoding=utf-16-le or -be")
    hints.tell(f"read as {name}, which has no byte order mark")
    return Encoding(name)


def codec_of(label: str) -> str:
    """Return Python's name of an encoding, wide enough for its texts, or "" for none."""
    try:
        label = _WIDER.get(label, label)
        b"text".decode(label, "ignore")  # fails for a codec between bytes, such as hex
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return ""
    return _WIDER.get(name, name)


def _declared(head: bytes) -> str:
    """The encoding that a page's or XML's head or an editor's line names, or ""."""
    label = EncodingDetector.find_declared_encoding(head, is_html=True) or ""
    if not label and (coding := _CODING.search(head)):
        label = coding[1].decode("ascii", "replace").lower()
    name = codec_of(label)
    # ASCII that says it is in one of these is not.
    return "" if name.startswith(("utf", "unicode")) else name


def _fits(sample: bytes, name: str) -> bool:
    """Whether most of these lines can be read in an encoding."""
    lines = [line.decode(name, "surrogateescape") for line in sample.splitlines()]
    return 2 * sum(any("\udc80" <= sign <= "\udcff" for sign in line) for line in lines) < len(lines)


def _guess(sample: bytes, hints: Hints) -> Encoding | None:
    guesses = chardet.detect_all(sample, encoding_era=_ERAS, compat_names=False)
    best = guesses[0]
    western = next((one for one in guesses if one["encoding"] == _WESTERN), best)
    if western["confidence"] >= _SHARE * best["confidence"]:
        best = western
    if best["encoding"] is None:
        return None
    said = f"read as {best['encoding']}, a guess with confidence {best['confidence']:.1f}"
    hints.tell(f"{said}: set encoding=NAME, or convert to UTF-8, if letters look wrong")
    return Encoding(best["encoding"], "surrogateescape")
