"""What a run prints and writes down: console lines, the logs of its children, and its events.

    say("trainer", "starting")                      # [trainer] starting, whole even from several threads
    tee = LogTee("solver", process.stdout, logs / "solver.log")
    EventLog(logs / EVENTS_FILE).add("crash", "solver", "died: exit code 1")

A child's output is read by a thread, because a child blocks when its pipe is full. The thread keeps what an
error message needs: the last lines, and the first that looks like an error, which is mostly the cause.
"""

import json
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

_LEVEL_BELOW_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b|Warning:")
_ERROR = re.compile(
    r"\b[\w.]*(Error|Exception)(:|$)|\b(ERROR|CRITICAL|FATAL)\b|^Fatal Python error|\bSegmentation fault\b"
    r"|\bcrashed with exit code\b"
)
_ORIGIN = re.compile(r"^(\([^)]*\) )?")  # Ray puts "(TaskRunner pid=12) " before a worker's line
_LONGEST_LINE = 64 * 1024  # bytes; a stream without line ends must not fill the memory
_PIECE = select.PIPE_BUF // 4  # characters, of at most 4 bytes: as many as a pipe with room takes at once


class _Console:
    """Stdout, from several threads. It may be blocked (Ctrl-S, `| less`) or closed (`| head`).

    Neither may stop the readers of a run's children: a line that cannot be written is dropped and counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_out = 0

    def print(self, line: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            missing = f"[drzero] {self._left_out} lines were not taken here; the logs have them"
            if self._left_out and _takes_more(0) and self._write(missing):
                self._left_out = 0
            if self._left_out or not self._write(line):
                self._left_out += 1

    def _write(self, line: str) -> bool:
        """Write as much as stdout accepts; return whether that was all."""
        text = line + "\n"
        for start in range(0, len(text), _PIECE):
            if not _takes_more(1.0):  # a pager may be slow, Ctrl-S lasts
                return False
            sys.stdout.write(text[start : start + _PIECE])
            sys.stdout.flush()
        return True


def _takes_more(wait_s: float) -> bool:
    """Whether stdout can be written to within this time."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file: a notebook's, a test's
        return True
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    return bool(poll.poll(wait_s * 1000))


_console = _Console()


def say(name: str, text: str) -> None:
    """Print one line to stdout as `[name] text`, whole even when several threads print."""
    _console.print(f"[{name}] {text}")


def looks_like_error(line: str) -> bool:
    """Whether a log line reads like an error: the end of a traceback, or a line logged as one."""
    text = _ORIGIN.sub("", line)
    if text.startswith((" ", "\t")):  # a traceback's body: source code may mention an error
        return False
    return bool(_ERROR.search(text)) and not _LEVEL_BELOW_ERROR.search(text)


class LogTee(threading.Thread):
    """Copies `source` to `log_path` (appending) and to stdout until its end, in a thread of its own."""

    def __init__(self, name: str, source: BufferedReader, log_path: Path, keep: int = 30) -> None:
        """Start reading at once; `keep` is how many of the last lines are remembered."""
        super().__init__(name=f"tee-{name}", daemon=True)
        self._command = name
        self.first_error: str | None = None
        self.tail: deque[str] = deque(maxlen=keep)
        """The last lines, oldest first."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("ab", buffering=0)
        self.offset = self._log.tell()
        """Where this child's output begins in a log that earlier ones have written to."""
        self._source = source
        self.start()

    def run(self) -> None:
        """Copy until the source ends."""
        pending = b""
        with self._source, self._log:
            while chunk := self._source.read1(_LONGEST_LINE):
                # A full disk must not stop the reading: the child would hang on a full pipe.
                with suppress(OSError):
                    self._log.write(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > _LONGEST_LINE:
                    lines, pending = [*lines, pending], b""
                for line in lines:
                    self._line(line)
            if pending:
                self._line(pending)

    def _line(self, raw: bytes) -> None:
        # A progress bar rewrites its line with carriage returns: only its last state is printed.
        line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(line)
        if self.first_error is None and looks_like_error(line):
            self.first_error = line.strip()
        say(self._command, line)


EVENTS_FILE = "events.jsonl"
OUT_OF_TIME = "out_of_time"


class EventLog:
    """Appends events to a file, or drops them."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`; None drops all events."""
        self._path = path

    def add(self, kind: str, component: str, text: str, **details: Any) -> None:
        """Append one event."""
        if self._path is not None:
            record = {"time": time.time(), "kind": kind, "component": component, "text": text, **details}
            append_json_lines(self._path, record)


def append_json_lines(path: Path, *records: Mapping[str, Any]) -> None:
    """Append to a file and create its folder; a full disk loses lines, never the run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, none if it is missing; a truncated line is left out."""
    records = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records
