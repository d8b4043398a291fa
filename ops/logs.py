"""Tee a child's output: every byte to its own log file, every line live to the terminal behind its name.

The reader is a thread, because a child blocks as soon as nobody empties its pipe. It also remembers what an
error message needs afterwards: the last lines, and the first line that looks like an error (the cause usually
stands there; the last lines are mostly its consequences).
"""

import re
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

_LEVEL_BELOW_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b|Warning:")
_ERROR = re.compile(
    r"\b[\w.]*(Error|Exception)(:|$)|\b(ERROR|CRITICAL|FATAL)\b|^Fatal Python error|\bSegmentation fault\b"
)
_ORIGIN = re.compile(r"^(\([^)]*\) )?")  # Ray puts "(TaskRunner pid=12) " before a worker's line
_LONGEST_LINE = 64 * 1024  # bytes; a stream without line ends must not fill the memory
_CONSOLE_WAIT_S = 1.0  # for a terminal that takes nothing; a pager may be slow, Ctrl-S lasts
_PIECE = select.PIPE_BUF // 4  # characters, of at most 4 bytes: as many as a pipe with room takes at once


class _Console:
    """Stdout, from several threads. It may take nothing (Ctrl-S, `| less`), or be closed (`| head`).

    Neither must stop a run, whose children wait for the readers that print here: a line that is not taken is
    left out here, and counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_out = 0

    def print(self, line: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._left_out and _takes_more(0):
                told = f"[drzero] {self._left_out} lines were not taken here; the logs have them"
                if self._write(told):
                    self._left_out = 0
            if self._left_out or not self._write(line):
                self._left_out += 1

    def _write(self, line: str) -> bool:
        """Write it as far as it is taken, and tell whether that was to its end."""
        text = line + "\n"
        for start in range(0, len(text), _PIECE):
            if not _takes_more(_CONSOLE_WAIT_S):
                return False
            sys.stdout.write(text[start : start + _PIECE])
            sys.stdout.flush()
        return True


def _takes_more(wait_s: float) -> bool:
    """Whether stdout can be written to without waiting longer than this."""
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
    """Tell whether a log line reads like an error: the end of a traceback, or a line logged as one.

    Indented lines are a traceback's own body (source code may well mention an error), so they do not count.
    """
    text = _ORIGIN.sub("", line)
    return (
        not text.startswith((" ", "\t")) and bool(_ERROR.search(text)) and not _LEVEL_BELOW_ERROR.search(text)
    )


class LogTee:
    """Copies `source` to `log_path` (appending) and to stdout until its end, in a thread of its own."""

    def __init__(self, name: str, source: BufferedReader, log_path: Path, keep: int = 30) -> None:
        """Start reading at once; `keep` is how many of the last lines are remembered."""
        self.name = name
        self.first_error: str | None = None
        self._tail: deque[str] = deque(maxlen=keep)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("ab", buffering=0)
        self.offset = self._log.tell()
        """Where this child's output begins in a log that earlier ones have written to."""
        self._source = source
        self._thread = threading.Thread(target=self._pump, name=f"tee-{name}", daemon=True)
        self._thread.start()

    def tail(self) -> list[str]:
        """Return the last lines, oldest first."""
        return list(self._tail)

    def join(self, timeout_s: float = 5.0) -> None:
        """Wait until the source has ended, or at most `timeout_s` where a stranger holds the pipe open."""
        self._thread.join(timeout_s)

    def _pump(self) -> None:
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
        # A progress bar rewrites its line with carriage returns: only its last state is worth a line.
        line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._tail.append(line)
        if self.first_error is None and looks_like_error(line):
            self.first_error = line.strip()
        say(self.name, line)
