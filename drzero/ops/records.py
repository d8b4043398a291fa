"""The reader of a run's events, beats, samples and flow, which are JSON lines. Only a line feed ends a line.

run = RunRecords(folder)
run.last_start[0]["text"], run.beats[-1]["phase"], run.lasting_stall
JsonTail(folder / HEARTBEATS).read()        # the new records of a run that still goes on
"""

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = dict[str, Any]

EVENTS_FILE = "events.jsonl"  # in `logs/`: what happened to the parts of a run
HEARTBEATS = "heartbeats.jsonl"  # which phase of which step began when
SAMPLES_FILE = "samples.jsonl"  # what each part used, every few seconds
FLOW_FILE = "flow.jsonl"  # snapshots of the samples on their way from rollout to update

EVENT_KEYS = ("time", "kind", "component", "text")
BEAT_KEYS = ("time", "step", "phase")
SAMPLE_KEYS = ("time", "component")

OUT_OF_TIME = "out_of_time"
_ENDS = ("stopped", "end", "exit", "cost")


class JsonTail:
    """Reads what others append to a JSON-lines file. A missing file has no lines."""

    def __init__(self, path: Path, keys: Collection[str] = (), offset: int = 0) -> None:
        """Start at byte `offset`. A line that is no object with these keys is left out and counted."""
        self._path = path
        self._keys = frozenset(keys)
        self._offset = offset
        self.unreadable = 0  # lines left out so far

    def read(self, *, to_end: bool = False) -> list[Record]:
        """The records since the last call. Without `to_end`, an unfinished last line waits for its end."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # the file was written anew
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        if not to_end:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        found = [self._parse(line) for line in data.split(b"\n") if line.strip()]
        self.unreadable += found.count(None)
        return [record for record in found if record is not None]

    def _parse(self, line: bytes) -> Record | None:
        with suppress(ValueError, RecursionError):
            record = json.loads(line.decode(errors="replace"))
            if isinstance(record, dict) and self._keys <= record.keys():
                return record
        return None


def read_json_lines(path: Path) -> list[Record]:
    """The records of a JSON-lines file, without lines that cannot be read."""
    return JsonTail(path).read(to_end=True)


def append_json_lines(path: Path, *records: Mapping[str, Any]) -> None:
    """Append to a file and create its folder. A full disk loses lines, never the run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


class RunRecords:
    """Everything a run has written down over all its starts. Each file is read on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: dict[str, int] = {}  # lines left out, by file

    @cached_property
    def events(self) -> list[Record]:
        """What happened to the parts of the run."""
        return self._read(f"logs/{EVENTS_FILE}", EVENT_KEYS)

    @cached_property
    def beats(self) -> list[Record]:
        """The beginning of each phase."""
        return self._read(HEARTBEATS, BEAT_KEYS)

    @cached_property
    def samples(self) -> list[Record]:
        """What each part used, and `host` for the machine."""
        return self._read(SAMPLES_FILE, SAMPLE_KEYS)

    @cached_property
    def flow(self) -> list[Record]:
        """The snapshots of the flow monitor."""
        return self._read(FLOW_FILE, ("time", "points"))

    @cached_property
    def last_start(self) -> list[Record]:
        """The events since the run was last started."""
        return of_last_start(self.events)

    @property
    def lasting_stall(self) -> Record | None:
        """The event of a stall after which nothing has moved."""
        moves = [event for event in self.last_start if event["kind"] in ("stall", "progress", "exit")]
        return moves[-1] if moves and moves[-1]["kind"] == "stall" else None

    def _read(self, name: str, keys: Collection[str]) -> list[Record]:
        tail = JsonTail(self.folder / name, keys)
        records = tail.read(to_end=True)
        if tail.unreadable:
            self.unreadable[name] = tail.unreadable
        return records


def of_last_start(events: list[Record]) -> list[Record]:
    """The events of the last start. A start after a kill is recognised by its process id."""
    begins, opened = 0, events[0] if events else {}
    for place, (earlier, event) in enumerate(pairwise(events), 1):
        if event["kind"] != "start":
            continue
        if earlier["kind"] in _ENDS or event.get("pid") != opened.get("pid"):
            begins = place
        opened = event
    return events[begins:]
