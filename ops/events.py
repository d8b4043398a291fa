"""What the supervision has seen and done, one JSON line an event, for whoever asks after the run is over.

A line is `{"time": unix seconds, "kind": "crash", "component": "retrieval", "text": …, …}`. Kinds: `start`,
`ready`, `crash`, `hung`, `restart`, `stopped`, `exit`, `stall`, `progress` (after a stall), `end`, `cost`,
`out_of_time` (it stopped itself before a set time; run again it goes on).
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
OUT_OF_TIME = "out_of_time"


class EventLog:
    """Appends events to a file, or to nothing; a full disk loses lines, never the run."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`; its folder is made."""
        self._path = path

    def add(self, kind: str, component: str, text: str, **details: Any) -> None:
        """Write one event down."""
        if self._path is None:
            return
        record = {"time": time.time(), "kind": kind, "component": component, "text": text, **details}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole records of a JSON-lines file, none if it is missing; a line that was cut off is left out."""
    records = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records
