"""A journal of long work: one JSON line per finished piece, so that a kill loses only pieces in progress."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from data.errors import DataError
from drzero.ops.console import say
from drzero.ops.records import parse_line

SAMPLES = "samples.jsonl"  # of synthesize and preview: their conversations with the challenger


class Journal:
    """An append-only file of JSON records with one writer."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open or create the journal. A damaged line costs itself. Raises DataError for other work."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        records = _records(path, content[:whole].split(b"\n")[:-1])
        if whole:
            was = records[0].get("identity") if records else None
            if not isinstance(was, dict):
                raise DataError(
                    f"{path} is no journal: its first line has no identity. Move it away to start over"
                )
            changes = [
                f"{key} was {was.get(key)!r} and is {identity.get(key)!r}"
                for key in sorted({*was, *identity})
                if was.get(key) != identity.get(key)
            ]
            if changes:
                raise DataError(
                    f"{path} holds the results of other work: {'; '.join(changes)}. Set another run.name, or "
                    "remove the file to start over"
                )
        self.records = records[1:]
        self._file = path.open("ab", buffering=0)
        if not whole:
            self._write({"identity": dict(identity)})

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, which is on disk when this returns, or raise OSError."""
        self._write(record)
        self.records.append(dict(record))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        try:
            while left:  # an almost full disk accepts only a part
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a journal without a writer."""
    return _records(path, path.read_bytes().split(b"\n"))[1:]


def _records(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = [parse_line(line) for line in lines if line.strip()]
    if damaged := found.count(None):
        say("journal", f"{damaged} damaged lines of {path} are left out", "warning")
    return [record for record in found if record is not None]
