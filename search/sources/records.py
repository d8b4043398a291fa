"""Tables as records, numbered from 1, or `Bad`. A reader that cannot go on raises ValueError or OSError."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from drzero.ops.files import open_regular
from search.sources.files import (
    LONGEST_LINE,
    TOO_LONG,
    Encoding,
    Hints,
    file_encoding,
    lines_of,
    open_text,
    read_text,
)

PARQUET_BATCH = 1024


@dataclass(frozen=True)
class Bad:
    """A record that cannot be read, and why."""

    why: str


Records = Iterator[tuple[int, Any]]


def read_jsonl(path: Path, hints: Hints) -> Records:
    """Yield a record per line, skipping blank lines."""
    with open_text(path, file_encoding(path, hints)) as stream:
        for number, line in enumerate(lines_of(stream), start=1):
            if line is None:
                yield number, Bad(TOO_LONG)
            elif line.strip():
                yield number, _parsed(line)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        return Bad("not JSON: nested too deep")
    except ValueError as error:
        return Bad(f"not JSON: {error}")


def read_json(path: Path, hints: Hints) -> Records:
    """Yield the records of a list, of an object's only list, or of lines. One object is one record."""
    text = read_text(path, hints)
    whole = _parsed(text)
    lines = [line for line in text.split("\n") if line.strip()]
    if isinstance(whole, Bad) and len(lines) > 1 and not isinstance(_parsed(lines[0]), Bad):
        yield from read_jsonl(path, hints)
        return
    if isinstance(whole, Bad):
        raise ValueError(whole.why)
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list) and value]
        of_records = [value for value in lists if all(isinstance(one, dict) for one in value)]
        whole = of_records[0] if len(of_records) == 1 else [whole]
    if not isinstance(whole, list):
        raise ValueError("neither a list of records nor one record")
    yield from enumerate(whole, start=1)


def read_csv(path: Path, hints: Hints) -> Records:
    """Yield the rows after the header, in the dialect that fits most lines."""
    csv.field_size_limit(LONGEST_LINE)  # the whole process's; csv's own 128 KiB is no long document
    encoding = file_encoding(path, hints)
    dialect = dialect_of(path, encoding)
    rows = _rows(_table_lines(path, encoding), dialect)
    header = next(rows, None)
    if header is None:
        raise ValueError("empty: no header")
    if header.fault:
        raise ValueError(f"not csv: {header.fault}")
    names = [name.strip() for name in header.fields]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise ValueError(f"the header has {twice[0]!r} more than once: rename one")
    for number, row in enumerate(rows, start=1):
        if row.fault or len(row.fields) != len(names):
            yield number, Bad(row.fault or f"{len(row.fields)} fields, and the header has {len(names)}")
            continue
        if row.takes_in_rows(len(names), dialect["delimiter"]):
            hints.tell(
                f"row {number} takes in lines {row.first + 1} to {row.last}, which read as rows: is "
                f"the quotation mark on line {row.first} closed where it should be?"
            )
        yield number, dict(zip(names, row.fields, strict=True))


class _Row(NamedTuple):
    """The fields on the lines from `first` to `last`, or why there are none."""

    first: int
    last: int
    fields: list[str]
    fault: str = ""

    def takes_in_rows(self, width: int, delimiter: str) -> bool:
        """Whether it has several lines, each with as many delimiters as a row of `width` fields."""
        lines = delimiter.join(self.fields).split("\n")
        return len(lines) > 1 < width and all(line.count(delimiter) == width - 1 for line in lines)

    def fits(self, width: int, dialect: Mapping[str, Any]) -> bool:
        """Whether it speaks for a dialect."""
        if self.fault or len(self.fields) != width or any(map(_SPACED_QUOTE.fullmatch, self.fields)):
            return False
        # In csv a quotation mark has a meaning. In other tables it is often just one.
        is_csv, is_plain = dialect["delimiter"] == ",", "quoting" in dialect
        if not is_plain:
            return is_csv or not self.takes_in_rows(width, dialect["delimiter"])
        torn = is_csv and any(field.count('"') % 2 for field in self.fields)
        return not torn and not any(map(_DOUBLED_QUOTE.fullmatch, self.fields))


_DELIMITERS = ",;\t|"
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # Excel's first line
# In RFC 4180, after a blank, with backslashes, and none at all.
_QUOTING: tuple[dict[str, Any], ...] = (
    {},
    {"skipinitialspace": True},
    {"doublequote": False, "escapechar": "\\"},
    {"quoting": csv.QUOTE_NONE},
)
_SPACED_QUOTE = re.compile(r'\s+".*"\s*', re.DOTALL)
_DOUBLED_QUOTE = re.compile(r'"(?:[^"]*"")+[^"]*"')
_JUDGED = 2**20  # Characters that the delimiter is judged by. All lines judge the quotation marks.


def dialect_of(path: Path, encoding: Encoding) -> dict[str, Any]:
    """Return the arguments for `csv.reader` with which most lines of a file fit its header."""
    with open_text(path, encoding) as stream:
        said = _SEPARATOR.fullmatch(stream.readline(20))
        sample, size = [], 0
        for line in _table_lines(path, encoding):
            sample.append(line)
            if (size := size + len(line)) > _JUDGED:
                break
    has_backslashes = any('\\"' in line for line in sample)
    found = [
        {"delimiter": delimiter} | quoting
        for delimiter in (said[1] if said else _DELIMITERS)
        for quoting in _QUOTING
        if has_backslashes or "escapechar" not in quoting  # csv takes any quotation mark for an end there
    ]
    delimiter = max(found, key=lambda dialect: _share(sample, dialect))["delimiter"]
    best, most = found[0], (False, -1.0)
    for dialect in found:
        if dialect["delimiter"] == delimiter and most[1] < 1:
            share = _share(_table_lines(path, encoding), dialect)
            best, most = (dialect, share) if share > most else (best, most)
    return best


def _share(lines: Iterable[str], dialect: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether a dialect finds several columns, and the share of lines that fit them."""
    rows = _rows(lines, dialect)
    width = len(header.fields) if (header := next(rows, None)) else 0
    fitting = count = quoted = total = 0
    for row in rows:
        lines_of_it = row.last - row.first + 1
        total += lines_of_it
        fitting += lines_of_it * row.fits(width, dialect)
        count += 1
        quoted += "quoting" in dialect and any(one[:1] == one[-1:] == '"' for one in row.fields)
    return width > 1, 0.0 if 2 * quoted > count else fitting / max(total, 1)


def _table_lines(path: Path, encoding: Encoding) -> Iterator[str]:
    """Yield a file's lines, also with old Macs' line ends, and a blank one for Excel's `sep=;`."""
    with open_text(path, encoding) as stream:
        for number, line in enumerate(lines_of(stream), start=1):
            if line is None:
                raise ValueError(f"line {number} {TOO_LONG}")
            if number == 1 and _SEPARATOR.fullmatch(line):
                yield "\n"
            elif line[-1] != "\n" and "\r" in line:
                yield from (f"{part}\n" for part in line.split("\r"))
            else:
                yield line


def _rows(lines: Iterable[str], dialect: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the rows that are not blank, without a spreadsheet's empty columns behind the header's."""
    reader, width = csv.reader(lines, strict=True, **dialect), 0
    while True:
        first, fields, fault = reader.line_num + 1, [], ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = reader.line_num
            where = f"line {last}" if first == last else f"lines {first} to {last}"
            fault = f"not csv on {where} ({error}): close the quotation mark, or double those within a field"
        if fault or any(field.strip() for field in fields):
            width = width or len(fields)
            while len(fields) > width and not fields[-1]:
                fields.pop()
            yield _Row(first, reader.line_num, fields, fault)


def read_parquet(path: Path, hints: Hints) -> Records:
    """Yield the rows. A damaged part ends them."""
    number, rows = 0, "the beginning"
    try:
        with open_regular(path) as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                rows = f"rows {number + 1} to {number + len(batch)}"
                batch.validate(full=True)  # texts must be UTF-8
                for record in _exact(batch).to_pylist():
                    number += 1
                    yield number, record
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the system's, not pyarrow's of a damaged page
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"not a parquet file, or damaged ({rows}): {why}") from error


def _exact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with 3.14 for a number in single precision, not 3.140000104904175."""
    single = {field.name for field in batch.schema if field.type == pa.float32()}
    for kind in (pa.string(), pa.float64()) if single else ():
        types = [each.with_type(kind) if each.name in single else each for each in batch.schema]
        batch = batch.cast(pa.schema(types))
    return batch


READERS: dict[str, tuple[str, Callable[[Path, Hints], Records]]] = {
    ".jsonl": ("line", read_jsonl),
    ".ndjson": ("line", read_jsonl),
    ".json": ("record", read_json),
    ".csv": ("row", read_csv),
    ".tsv": ("row", read_csv),
    ".parquet": ("row", read_parquet),
}
"""By file kind: what a record's number counts, and its reader."""
