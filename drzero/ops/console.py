"""The output of a run: `say` always prints, `detail` only with `verbose=true`."""

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Protocol, TextIO

from drzero.ops.notices import Level, Notice, plain

_PIECE = select.PIPE_BUF // 4  # characters of at most 4 bytes: a pipe takes this many at once


class View(Protocol):
    """Draws on the terminal instead of stdout. Neither method may block on the terminal."""

    def notice(self, notice: Notice) -> None:
        """Show an event."""

    def line(self, text: str) -> None:
        """Show a line of a child's output."""


class _Stdout:
    """Stdout that may be blocked (Ctrl-S) or closed (`| head`). It then drops and counts lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_out = 0

    def notice(self, notice: Notice) -> None:
        self.line(str(notice))

    def line(self, text: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            try:
                self._take(text)
            except BrokenPipeError:
                leave_stdout()

    def _take(self, text: str) -> None:
        missing = f"[drzero] {self._left_out} lines could not be printed; the logs have them"
        if self._left_out and takes_more(0) and self._write(missing):
            self._left_out = 0
        if self._left_out or not self._write(text):
            self._left_out += 1

    def _write(self, line: str) -> bool:
        text = line + "\n"
        for start in range(0, len(text), _PIECE):
            if not takes_more(1.0):  # a slow pager continues within a second, Ctrl-S does not
                return False
            sys.stdout.write(text[start : start + _PIECE])
            sys.stdout.flush()
        return True


def replace_unshowable() -> None:
    """Have stdout and stderr replace what their encoding lacks, such as ASCII or Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not so in a notebook
            stream.reconfigure(errors="replace")


def leave_stdout() -> None:
    """Discard further output, because the reader has closed its end (`| head`)."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def stdout_apart() -> Iterator[TextIO]:
    """Give stdout to the caller alone. All else that prints, libraries and children too, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as own:
        os.dup2(2, 1)
        try:
            yield own
        finally:
            sys.stdout.flush()
            own.flush()
            os.dup2(own.fileno(), 1)


def takes_more(wait_s: float) -> bool:
    """Whether stdout accepts output within this time."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook or a test
        return True
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    return bool(poll.poll(wait_s * 1000))


def has_live_terminal() -> bool:
    """Whether stdout is a terminal that can redraw a line. CI systems may only pretend to be one."""
    stdout = sys.stdout
    return (
        stdout.isatty()
        and os.environ.get("TERM") not in (None, "", "dumb", "unknown")
        and not os.environ.get("CI")
        and (stdout.encoding or "").lower().startswith("utf")
    )


class _Console:
    def __init__(self) -> None:
        self.view: View = _Stdout()
        self.is_verbose = False


_console = _Console()


def set_verbose(on: bool) -> None:
    """Turn `detail` on or off."""
    _console.is_verbose = on


def is_verbose() -> bool:
    """Whether `detail` prints."""
    return _console.is_verbose


@contextmanager
def shown_by(view: View) -> Iterator[None]:
    """Send all output to `view` inside the block."""
    before, _console.view = _console.view, view
    try:
        yield
    finally:
        _console.view = before


def say(component: str, text: str, level: Level = "info") -> None:
    """Print the notice `[component] text`."""
    announce(Notice(time.time(), component, plain(text), level))


@contextmanager
def working(component: str, text: str) -> Iterator[None]:
    """Show a spinner for `component` on a terminal while the block runs."""
    if not has_live_terminal() or _console.is_verbose:
        yield
        return
    from rich.console import Console  # slow to import, and workers only print lines

    with Console(markup=False).status(f"[{component}] {text}"):
        yield


def announce(notice: Notice) -> None:
    """Print one notice."""
    _console.view.notice(notice)


def relay(component: str, line: str) -> None:
    """Print a line of a child's output after its name."""
    _console.view.line(f"[{component}] {plain(line)}")


def detail(component: str, line: str) -> None:
    """Like `relay`, but only with `verbose=true`."""
    if _console.is_verbose:
        relay(component, line)
