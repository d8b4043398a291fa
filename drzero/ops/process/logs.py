"""A run's logs and events. A child blocks on a full pipe, so a thread reads its output."""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from drzero.ops import console
from drzero.ops.notices import STARTUP_KIND, notice_of, shortened, shown_line
from drzero.ops.records import EVENTS_FILE, append_json_lines

_LEVEL_BELOW_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b|Warning:")
_ERROR = re.compile(
    r"\b[\w.]*(Error|Exception)(:|$)|\b(ERROR|CRITICAL|FATAL)\b|^Fatal Python error"
    r"|\b(Segmentation fault|Bus error|SIGBUS)\b|\bcrashed with exit code\b"
    r"|\b[1-9]\d* (Workers \(tasks / actors\) killed|Workers crashed|worker\(s\) were killed)"  # Ray's words
    r"|^A worker died or was killed"
)
_ORIGIN = re.compile(r"^(\([^)]*\) )?")  # Ray puts "(TaskRunner pid=12) " before a worker's line
_LONGEST_LINE = 64 * 1024  # bytes; output without line ends must not fill the memory
_ERRORS_SHOWN = 3  # for a child that continues; the consequences of one error would fill the console


def looks_like_error(line: str) -> bool:
    """Whether a log line ends a traceback or was logged as an error."""
    text = _ORIGIN.sub("", line)
    if text.startswith((" ", "\t")):  # source code in a traceback may mention an error
        return False
    return bool(_ERROR.search(text)) and not _LEVEL_BELOW_ERROR.search(text)


class LogTee(threading.Thread):
    """Appends `source` to `log_path`. The console shows the first errors only, or all with `relays`.

    Its `signs` become events, next to the log.
    """

    def __init__(
        self,
        name: str,
        source: BufferedReader,
        log_path: Path,
        keep: int = 30,
        *,
        relays: bool = False,
        signs: Mapping[str, str] | None = None,
    ) -> None:
        """Start reading and remember the last `keep` lines."""
        super().__init__(name=f"tee-{name}", daemon=True)
        self._command = name
        self._relays = relays
        self._signs = dict(signs or {})
        self._events = EventLog(log_path.parent / EVENTS_FILE)
        self._in_mapping = False  # within a mapping of many lines: veRL prints its whole config
        self._errors = 0
        self.is_stopping = False  # whether new output only concerns being stopped
        self.first_error: str | None = None
        self.tail: deque[str] = deque(maxlen=keep)  # the last lines, oldest first
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("ab", buffering=0)
        self.offset = self._log.tell()  # where this child's output begins in the log
        self._source = source
        self.start()

    def run(self) -> None:
        """Copy until the source ends."""
        pending = b""
        with self._source, self._log:
            while chunk := self._source.read1(_LONGEST_LINE):
                # Keep reading on a full disk, or the child would hang on a full pipe.
                with suppress(OSError):
                    self._log.write(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > _LONGEST_LINE:
                    lines, pending = [*lines, pending], b""
                for line in lines:
                    self._line(line)
                self._look_for_signs(pending)  # a progress bar has no line end
            if pending:
                self._line(pending)

    def _look_for_signs(self, raw: bytes) -> None:
        for text in [text for sign, text in self._signs.items() if sign.encode() in raw]:
            if text in self._signs.values():  # not with another sign of the same line
                self._events.add(STARTUP_KIND, self._command, text)
                self._signs = {sign: other for sign, other in self._signs.items() if other != text}

    def _line(self, raw: bytes) -> None:
        self._look_for_signs(raw)
        line = shown_line(raw)
        self.tail.append(line)
        shown, is_error = shortened(line), looks_like_error(line)
        if is_error and self.first_error is None:
            self.first_error = shown.strip()
        if self._relays or console.is_verbose():
            self._relay(line)
        elif is_error and not self.is_stopping:
            self._errors += 1
            if self._errors <= _ERRORS_SHOWN:
                console.say(self._command, shown.strip(), "error")
            elif self._errors == _ERRORS_SHOWN + 1:
                console.say(self._command, f"more errors: {self._log.name}", "error")

    def _relay(self, line: str) -> None:
        text = _ORIGIN.sub("", line)
        if text.startswith("{'"):  # as pprint begins a mapping
            self._in_mapping = not text.endswith("}")
            line = f"{line} … (the rest is in {self._log.name})" if self._in_mapping else line
        elif self._in_mapping and text.startswith(" "):
            self._in_mapping = not text.endswith("}")
            return
        console.relay(self._command, line)


class EventLog:
    """Appends events to a file and prints them as notices (`drzero.ops.notices`)."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`, if it is not None."""
        self._path = path

    def add(self, kind: str, component: str, text: str, **details: Any) -> None:
        """Print and append one event. Its `pid` tells several writers apart."""
        record = {"time": time.time(), "kind": kind, "component": component, "text": text, **details}
        if self._path is not None:
            append_json_lines(self._path, record | {"pid": os.getpid()})
        if notice := notice_of(record):
            console.announce(notice)
