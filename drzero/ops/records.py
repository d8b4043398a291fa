"""Reads everything we write as JSON lines. Only a line feed ends a line, and a bad line costs itself."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from drzero.ops.files import open_regular
from drzero.ops.notices import STARTUP_KIND

Record = dict[str, Any]
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # a calendar can show it

EVENTS_FILE = "events.jsonl"  # in `logs/`: what happened to the parts of a run
HEARTBEATS = "heartbeats.jsonl"  # when each phase of a step began
SAMPLES_FILE = "samples.jsonl"  # what each part used, every few seconds
FLOW_FILE = "flow.jsonl"  # snapshots of the samples on their way from rollout to update

OUT_OF_TIME = "out_of_time"
_ENDS = ("stopped", "end", "exit", "cost")
_LARGEST = 1e100  # squares of larger numbers have no sum


def shape(required: Mapping[str, Any], **optional: Any) -> type:
    """A type that `parse_line` checks a record against, by key. Other keys are free."""
    fields: list[Any] = [*required.items(), *((key, of, None) for key, of in optional.items())]
    return msgspec.defstruct("Line", fields)


EventLine = shape(
    {"time": Time, "kind": str, "component": str, "text": str},
    **{"step": float | None, "offset": Step, "code": int | None, "silent_s": float, "evidence": list[str]},
    **dict.fromkeys(("first_error", "culprit", "advice"), str | None),
)
BeatLine = shape({"time": Time, "step": Step, "phase": str})
SampleLine = shape(
    {"time": Time, "component": str},
    gpus=list[  # type: ignore[misc]
        shape({"used_mb": float | None, "busy_percent": float | None}, name=str | None, total_mb=float | None)
    ],
    **{"state": str, **dict.fromkeys(("cpu_share", "rss_mb", "load"), float)},
    **dict.fromkeys(("gpu_mb", "memory_free_mb", "disk_free_gb"), float | None),
)
SAMPLE_ENDS = ("accepted", "invalid", "failed", "stale", "filtered", "in_flight", "lost")
FlowLine = shape(
    {
        "time": Time,
        "points": dict[str, dict[str, float | str | None]],
        "samples": shape({"asked": float, "produced": float}, **dict.fromkeys(SAMPLE_ENDS, float)) | None,
        "waiting": shape({"point": str, "have": float, "want": float, "since_s": float}) | None,
        "warmup": bool,
        "symptoms": list[shape({"check": str, "point": str, "text": str})],  # type: ignore[misc]
    },
    rates=dict[str, float] | None,
    about=shape({}, warmup_s=float | None),
)


def _number(text: str) -> float | None:
    number = float(text)
    return number if abs(number) < _LARGEST else None


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= 100 else None


_decode = json.JSONDecoder(parse_float=_number, parse_int=_whole, parse_constant=lambda _: None).decode


def parse_line(line: bytes, of: Any = Record) -> Record | None:
    """A line's object, None if it is none or does not fit `of`. A number that nothing can add is null.

    NaN, infinity and numbers beyond 1e100 are such: one of them would take the others' mean with it.
    """
    with suppress(ValueError, RecursionError):
        record = _decode(line.decode("utf-8-sig"))
        msgspec.convert(record, of)
        return record if isinstance(record, dict) else None
    return None


def json_lines(path: Path, of: Any = Record) -> Iterator[tuple[int, Record | None]]:
    """Each line's number and record as `parse_line` reads it. Raises OSError, for a FIFO or device too."""
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse_line(line, of)


class JsonTail:
    """Reads what others append to a JSON-lines file. A missing file has no lines."""

    def __init__(self, path: Path, of: Any = Record, offset: int = 0) -> None:
        """Start at byte `offset`. A line that is no such record is left out and counted."""
        self._path = path
        self._of = of
        self._offset = offset
        self.unreadable = 0  # lines left out so far

    def read(self, *, to_end: bool = False) -> list[Record]:
        """The records since the last call. Without `to_end`, an unfinished last line waits for its end."""
        return list(self.stream(to_end=to_end))

    def stream(self, *, to_end: bool = False) -> Iterator[Record]:
        """The same one by one, for files that are larger than memory."""
        with suppress(OSError), open_regular(self._path) as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # the file was written anew
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not (to_end or line.endswith(b"\n")):
                    break
                self._offset += len(line)
                if not line.strip():
                    continue
                if (record := parse_line(line, self._of)) is None:
                    self.unreadable += 1
                else:
                    yield record


def read_json_lines(path: Path, of: Any = Record) -> list[Record]:
    """The records of a JSON-lines file, without lines that cannot be read."""
    return JsonTail(path, of).read(to_end=True)


def read_object(path: Path) -> Record:
    """The JSON object in a file, empty if the file is missing or holds something else."""
    with suppress(OSError), open_regular(path) as file:
        return parse_line(file.read()) or {}
    return {}


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
        self.unreadable: dict[str, str] = {}  # what was left out, by file

    @cached_property
    def events(self) -> list[Record]:
        """What happened to the parts of the run."""
        return self._read(f"logs/{EVENTS_FILE}", EventLine)

    @cached_property
    def beats(self) -> list[Record]:
        """The beginning of each phase."""
        return self._read(HEARTBEATS, BeatLine)

    @cached_property
    def samples(self) -> list[Record]:
        """What each part used, and `host` for the machine."""
        return self._read(SAMPLES_FILE, SampleLine)

    @cached_property
    def flow(self) -> list[Record]:
        """The snapshots of the flow monitor."""
        return self._read(FLOW_FILE, FlowLine)

    @cached_property
    def last_start(self) -> list[Record]:
        """The events since the run was last started."""
        return of_last_start(self.events)

    @property
    def startup(self) -> str:
        """What the last start is doing, until its first rollout begins."""
        began = self.last_start[0]["time"] if self.last_start else 0.0
        if any(beat["phase"] == "rollout" and beat["time"] >= began for beat in self.beats):
            return ""
        said = [str(event["text"]) for event in self.last_start if event["kind"] == STARTUP_KIND]
        return said[-1] if said else ""

    @property
    def lasting_stall(self) -> Record | None:
        """The event of a stall after which nothing has moved."""
        moves = [event for event in self.last_start if event["kind"] in ("stall", "progress", "exit")]
        return moves[-1] if moves and moves[-1]["kind"] == "stall" else None

    def _read(self, name: str, of: Any) -> list[Record]:
        tail = JsonTail(self.folder / name, of)
        records = tail.read(to_end=True)
        if tail.unreadable:
            self.unreadable[name] = f"{tail.unreadable} lines"
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
