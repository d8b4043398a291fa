"""Runs a command that may crash or hang in a separate process with a time limit.

A process that hangs in a driver and survives SIGKILL is left behind.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from drzero.ops.errors import RunFailed
from drzero.ops.process.child import describe_exit
from drzero.ops.process.keeper import die_with
from drzero.ops.records import parse_line

_KILLED_WITHIN_S = 5.0
_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_child(function: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Call `function` in a separate process. Its result is returned, its exception raised.

    A process that waits for hours must not hold what its checks imported. RunFailed if the child is killed.
    """
    if {"torch", "chromadb"} & sys.modules.keys():  # a child would save nothing
        return function(*args, **named)
    fork, parent = multiprocessing.get_context("fork"), os.getpid()
    with ProcessPoolExecutor(1, fork, initializer=die_with, initargs=(parent, signal.SIGKILL)) as child:
        try:
            return child.submit(function, *args, **named).result()
        except BrokenProcessPool:
            raise RunFailed(
                f"{function.__name__} ended abruptly: its process crashed, or was killed for lack of memory"
            ) from None


@dataclass(frozen=True)
class Ended:
    """The result of a command. `fault` is None for exit code 0."""

    fault: str | None
    out: str

    def records(self) -> list[Any]:
        """Return the JSON objects that it printed, one per line."""
        found = [parse_line(line.encode()) for line in self.out.split("\n") if line.startswith("{")]
        return [record for record in found if record is not None]


def run_isolated(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command for at most `limit_s` seconds. `env` extends this process's environment."""
    # Files, not pipes: a survivor of the command would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {})},
            process_group=0,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_WITHIN_S)
        for file in (out, err):
            file.seek(0)
        printed, said = out.read().decode(errors="replace"), last_line(err.read())
    if code is None:
        return Ended(f"it hung: no result after {limit_s:.0f} s", printed)
    ended = said if code > 0 and said else f"{describe_exit(code)}{f': {said}' if said else ''}"
    return Ended(ended if code else None, printed)


def last_line(output: bytes) -> str:
    """Return the last non-empty line, up to 300 characters."""
    lines = [line for line in output.decode(errors="replace").split("\n") if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
