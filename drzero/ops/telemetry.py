"""Small files in which a training process reports its work, for a watchdog or a person.

    Heartbeat(run / "heartbeats.jsonl").beat(3, "rollout")      # in the trainer: its phase
    with waiting("search", limit_s=60): …                       # in any worker: what it waits for

No stack dump shows suspended coroutines, so each worker rewrites `$DRZERO_PROGRESS_DIR/HOST-PID.json` every
second. Its `time` stops if something holds the GIL, a tick in `loops` if that loop is blocked.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import psutil

DIRECTORY_VARIABLE = "DRZERO_PROGRESS_DIR"
_EVERY_S = 1.0
_KEPT_CAUSES = 50  # distinct exceptions kept for each kind of call
_AT_ONCE_S = 0.1  # delay after the last open call, because the worker may be killed right after it

Phase = Literal[
    "start-up",
    "rollout",
    "log-probs",
    "advantage",
    "update",
    "save",
    "weight-sync",
    "validation",
    "out-of-time",
    "done",
]


class Heartbeat:
    """Appends to one file. Each line is flushed, so it survives a killed trainer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def beat(self, step: int, phase: Phase) -> None:
        """Log that the phase begins now."""
        self._file.write(json.dumps({"time": time.time(), "step": step, "phase": phase}) + "\n")


def waiting(kind: str, limit_s: float | None = None) -> AbstractContextManager[None]:
    """Count the body as a call in this process (`Progress.waiting`)."""
    return progress().waiting(kind, limit_s)


def progress() -> Progress:
    """This process's counters. A forked child has its own."""
    return _progress_of(os.getpid())


@functools.cache
def _progress_of(pid: int) -> Progress:
    folder = os.environ.get(DIRECTORY_VARIABLE)
    # Several nodes share the folder, and each numbers its processes from 1.
    return Progress(Path(folder) / f"{os.uname().nodename}-{pid}.json" if folder else None)


class Progress:
    """The counters of one process."""

    def __init__(self, path: Path | None) -> None:
        """With None, only count."""
        self._file = None if path is None else StatusFile(path)
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._causes: dict[str, dict[str, int]] = {}
        self._seconds: dict[str, float] = {}
        self._idle = threading.Event()
        self._open: dict[object, tuple[str, float, float | None]] = {}
        self._polled: dict[str, Callable[[], float]] = {}
        self._ticks: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, kind: str, limit_s: float | None = None) -> Iterator[None]:
        """Count the body as a call, open, done or failed. `limit_s` is the call's own deadline, if any."""
        self._begin()
        key, began = object(), time.monotonic()
        self._open[key] = (kind, time.time(), limit_s)
        try:
            yield
        except BaseException as error:
            self._failed[kind] += 1
            self._add_cause(kind, " ".join(f"{type(error).__name__}: {error}".split())[:300])
            raise
        else:
            self._done[kind] += 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + time.monotonic() - began
        finally:
            del self._open[key]
            if not self._open:
                self._idle.set()

    def _add_cause(self, kind: str, cause: str) -> None:
        causes = self._causes.get(kind, {})
        if cause in causes or len(causes) < _KEPT_CAUSES:
            # A new dict: the writing thread may be reading the old one.
            self._causes[kind] = {**causes, cause: causes.get(cause, 0) + 1}

    def poll(self, kind: str, total: Callable[[], float]) -> None:
        """Report `total()` as `done[kind]` whenever the file is written."""
        self._polled[kind] = total
        self._begin()

    def snapshot(self) -> dict[str, Any]:
        """The file's content. The title is the command line, which Ray and `setproctitle` rewrite."""
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "title": " ".join(psutil.Process().cmdline()).strip(),
            "done": {**self._done, **{kind: total() for kind, total in self._polled.items()}},
            "failed": dict(self._failed),
            "causes": dict(self._causes),
            "seconds": {kind: round(seconds, 4) for kind, seconds in list(self._seconds.items())},
            "open": [list(call) for call in list(self._open.values())],
            "loops": list(self._ticks.values()),
        }

    def _begin(self) -> None:
        if self._file is None:
            return
        with suppress(RuntimeError):  # no loop runs in this thread
            loop = asyncio.get_running_loop()
            if loop not in self._ticks:
                self._tick(loop)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="progress", daemon=True)
            self._thread.start()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks[loop] = time.time()
        loop.call_later(_EVERY_S, self._tick, loop)

    def _write_forever(self) -> None:
        while self._file:
            # A full disk, or a counter of an engine that is closing, must not end the worker.
            with suppress(OSError, RuntimeError, psutil.Error):
                self._file.write(self.snapshot())
            time.sleep(_AT_ONCE_S)
            self._idle.wait(_EVERY_S - _AT_ONCE_S)
            self._idle.clear()


class StatusFile:
    """A small JSON file, rewritten in place by one padded write, so that readers never see half of it."""

    def __init__(self, path: Path) -> None:
        with suppress(OSError):  # `write` raises it
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content. Raises OSError, for example if the folder was removed."""
        data = json.dumps(content).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
        finally:
            os.close(descriptor)
