"""Dumps the stack of every Python process of a run with py-spy, all at once.

`--nonblocking` also reads stopped processes. A changing stack fails and is retried once.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drzero.ops.grouping import by_key
from drzero.ops.process.tree import STOPPED, ZOMBIE, Process, descendants

_COMPARED = 12  # innermost calls of processes that stand at the same place


@dataclass(frozen=True)
class Frame:
    """One call: function, file as py-spy shortens it (`asyncio/runners.py`), line."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """One thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    active: bool = False


@dataclass(frozen=True)
class Stack:
    """One process."""

    pid: int
    component: str  # the service or main command that it belongs to
    title: str
    state: str = "S"
    """The kernel's letter: T stopped (t by a debugger), D waits for a disk, Z ended but not collected."""
    threads: tuple[Thread, ...] = ()
    failure: str | None = None  # why there are no threads
    node: str = ""  # the cluster node that it runs on; empty for this machine

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames, innermost first."""
        for thread in self.threads:
            if thread.name == "MainThread":
                return thread.frames
        return self.threads[0].frames if self.threads else ()


def find_py_spy() -> str | None:
    """Return the path of py-spy, next to this interpreter or on PATH."""
    own = Path(sys.executable).parent / "py-spy"
    return str(own) if own.is_file() else shutil.which("py-spy")


def dump_stacks(
    processes: Iterable[tuple[str, Process]], deadline_s: float = 8.0, native: bool = False
) -> list[Stack]:
    """Dump each (component, process) in parallel, all within `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    with ThreadPoolExecutor(8, thread_name_prefix="py-spy") as pool:
        return list(pool.map(lambda one: _dump(one[0], one[1], end, native), processes))


def why_unreadable() -> str | None:
    """Return why py-spy cannot read processes on this machine, or None. It tries this process."""
    own = descendants([os.getpid()])[os.getpid()][0]
    return dump_stacks([("self", own)])[0].failure


def _dump(component: str, process: Process, end: float, native: bool) -> Stack:
    known = Stack(process.pid, component, process.title, process.state)
    py_spy, problem = find_py_spy(), "py-spy is not installed"
    if process.state == ZOMBIE or not process.is_python or py_spy is None:
        return replace(known, failure=None if py_spy or not process.is_python else problem)
    # py-spy must pause a process to read native frames, and a stopped process cannot be paused.
    paused = native and process.state != STOPPED
    for mode in ["--native"] * paused + ["--nonblocking"] * 2:
        left = end - time.monotonic()
        if left <= 0:
            return replace(known, failure=f"no time left; {problem}")
        try:
            command = [py_spy, "dump", "--json", mode, "--pid", str(process.pid)]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"py-spy: {error}"
            continue
        if answer.returncode == 0:
            return replace(known, threads=parse_dump(answer.stdout))
        problem = "py-spy: " + " ".join(answer.stderr.split("Stack backtrace")[0].split())[:300]
    return replace(known, failure=problem)


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Read the threads in the output of `py-spy dump --json`."""
    records: list[dict[str, Any]] = json.loads(text)
    return tuple(
        Thread(
            name=str(record.get("thread_name") or "?"),
            frames=tuple(
                Frame(str(f["name"]), str(f.get("short_filename") or f["filename"]), int(f["line"]))
                for f in record["frames"]
            ),
            active=bool(record.get("active")),
        )
        for record in records
    )


def group_stacks(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Group processes by their main threads' innermost calls (without lines), largest group first."""

    def place(stack: Stack) -> tuple[tuple[str, str], ...]:
        return tuple((frame.name, frame.file) for frame in stack.main[:_COMPARED])

    groups = by_key((stack for stack in stacks if stack.main), place)
    return sorted(groups.values(), key=len, reverse=True)


def minorities(stacks: Sequence[Stack]) -> list[Stack]:
    """Return the processes at another position than most, as suspects."""
    groups = group_stacks(stacks)
    if len(groups) < 2 or len(groups[0]) == len(groups[1]):
        return []
    return [stack for group in groups[1:] for stack in group]
