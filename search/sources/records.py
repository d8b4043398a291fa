"""Tables as records, numbered from 1, or `Bad`. A reader that cannot go on raises ValueError or OSError."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drzero.ops.files import open_regular
from search.sources.files import Encoding, open_text, read_text

PARQUET_BATCH = 1024
_DELIMITERS = ",;\t|"

Used = Callable[[Encoding], object]  # Called with each file's encoding


@dataclass(frozen=True)
class Bad:
    """A record that cannot be read, and why."""

    why: str


Records = Iterator[tuple[int, Any]]


def read_jsonl(path: Path, used: Used) -> Records:
    """Yield a record per line, skipping blank lines."""
    with open_text(path, used) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parsed(line)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        return Bad("not JSON: nested too deep")
    except ValueError as error:
        return Bad(f"not JSON: {error}")


def read_json(path: Path, used: Used) -> Records:
    """Yield the records of a list, of an object's only list, or of lines. One object is one record."""
    text = read_text(path, used)
    whole = _parsed(text)
    lines = [line for line in text.split("\n") if line.strip()]
    if isinstance(whole, Bad) and len(lines) > 1 and not isinstance(_parsed(lines[0]), Bad):
        yield from read_jsonl(path, used)
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


def read_csv(path: Path, used: Used) -> Records:
    """Yield the rows after the header. The header decides the delimiter and the number of fields."""
    csv.field_size_limit(2**31 - 1)  # the whole process's; csv's own 128 KiB is no long document
    with open_text(path, used) as stream:
        header_line = next((line for line in stream if line.strip()), "")
    if not header_line:
        raise ValueError("empty: no header")
    delimiter = max(_DELIMITERS, key=header_line.count)
    with open_text(path, used) as stream:
        rows = csv.reader(stream, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        number = 0
        try:
            for row in rows:
                if not any(field.strip() for field in row):
                    continue
                if header is None:
                    header = [name.strip() for name in row]
                    continue
                number += 1
                if len(row) == len(header):
                    yield number, dict(zip(header, row, strict=True))
                else:
                    yield number, Bad(f"{len(row)} fields, and the header has {len(header)}")
        except csv.Error as error:
            raise ValueError(f"not csv from line {rows.line_num} on ({error})") from error


def read_parquet(path: Path, used: Used) -> Records:
    """Yield the rows. A damaged part ends them."""
    number, rows = 0, "the beginning"
    try:
        with open_regular(path) as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                rows = f"rows {number + 1} to {number + len(batch)}"
                batch.validate(full=True)  # texts must be UTF-8
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except pa.ArrowException as error:
        raise ValueError(f"not a parquet file, or damaged ({rows}): {error}") from error


READERS: dict[str, tuple[str, Callable[[Path, Used], Records]]] = {
    ".jsonl": ("line", read_jsonl),
    ".ndjson": ("line", read_jsonl),
    ".json": ("record", read_json),
    ".csv": ("row", read_csv),
    ".tsv": ("row", read_csv),
    ".parquet": ("row", read_parquet),
}
"""By file kind: what a record's number counts, and its reader."""
