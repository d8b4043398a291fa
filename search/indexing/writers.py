"""Processes that write shards while this one embeds the next.

    with Writers(most=2) as writers:
        writers.start("shard-00-of-04", unwritten)      # waits for a free place

They die with this process, even by SIGKILL, and the next run writes their shards again from the journals.
"""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, NamedTuple

from setproctitle import setproctitle

from drzero.ops.process.keeper import die_with
from search.errors import StoreError
from search.indexing.build import JOURNAL, Unwritten
from search.indexing.journal import PROGRESS

_PROCESSES = multiprocessing.get_context("spawn")  # Not forked: this process has threads, of torch and Chroma


class _Running(NamedTuple):
    process: SpawnProcess
    answer: Connection
    started: float


class Writers:
    """At most `most` processes, each writing a shard."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until everything is written, or end the processes after an error."""
        try:
            if kind is None:
                self._wait(0)
        finally:
            for running in self._running.values():
                running.process.kill()
                running.process.join()

    def start(self, name: str, unwritten: Unwritten) -> None:
        """Write a shard in its own process. Raises the error of any that failed."""
        self._wait(self._most - 1)
        answer, its_answer = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_write, args=(name, unwritten, its_answer, os.getpid()))
        process.start()
        its_answer.close()
        self._running[name] = _Running(process, answer, time.monotonic())

    def _wait(self, most: int) -> None:
        while len(self._running) > most:
            wait([running.process.sentinel for running in self._running.values()])
            for name, running in list(self._running.items()):
                if not running.process.is_alive():
                    del self._running[name]
                    _check(name, running)
                    print(f"{name} is written, {time.monotonic() - running.started:.1f} s", flush=True)


def _check(name: str, running: _Running) -> None:
    running.process.join()
    try:
        error: Any = running.answer.recv()
    except EOFError:  # it was ended before it could answer
        raise StoreError(
            f"the process that wrote {name} was ended (exit code {running.process.exitcode}; -9 is often a "
            "lack of memory): run it again, it resumes, with fewer indexing.writers where memory is short"
        ) from None
    if error is not None:
        raise error


def _write(name: str, unwritten: Unwritten, answer: Connection, parent: int) -> None:
    if not die_with(parent, signal.SIGKILL):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    setproctitle(f"drzero: writes {name}")
    PROGRESS["disable"] = True  # its bar would be drawn over the parent's
    try:
        unwritten.write()
        (unwritten.work / JOURNAL).unlink()  # of the index's size
    except Exception as error:  # of many types from Chroma, SQLite and the system: the parent raises it
        answer.send(error)
    else:
        answer.send(None)
