"""The processes of a run at one moment, cheap enough to repeat every few seconds. Linux only."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
STOPPED = "T"
ZOMBIE = "Z"


@dataclass(frozen=True)
class Process:
    """A process as in /proc/PID/stat. `state` is the kernel's letter (R, S, D, T, Z)."""

    pid: int
    state: str
    cpu_s: float  # CPU seconds of all its threads since its start
    rss_bytes: int
    threads: int

    @cached_property
    def title(self) -> str:
        """Its command line or the title that it set, empty if it has ended."""
        with suppress(OSError):
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
            return raw.replace(b"\0", b" ").decode(errors="replace").strip()
        return ""

    @cached_property
    def is_python(self) -> bool:
        """Whether it runs a Python interpreter."""
        with suppress(OSError):
            return os.path.basename(os.readlink(f"/proc/{self.pid}/exe")).startswith("python")
        return False

    def waited_s(self) -> float:
        """Return the seconds that its present threads waited for a CPU, as far as the kernel counts them."""
        waited_ns = 0
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(OSError, ValueError, IndexError):
                    waited_ns += int(
                        Path(f"/proc/{self.pid}/task/{thread}/schedstat").read_bytes().split()[1]
                    )
        return waited_ns / 1e9

    def io_bytes(self) -> tuple[int, int]:
        """Return bytes read from and written to storage, or zeros if the system does not show them."""
        # Without /proc/PID/io psutil has no such method; the last two errors come from a malformed file.
        with suppress(OSError, psutil.Error, AttributeError, RuntimeError, ValueError):
            counts = psutil.Process(self.pid).io_counters()
            return counts.read_bytes, counts.write_bytes
        return 0, 0


def descendants(roots: Iterable[int]) -> dict[int, list[Process]]:
    """Return each root and all its descendants. A process below two roots belongs to the nearer one."""
    everyone: dict[int, Process] = {}
    children: dict[int, list[Process]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        # A process may end after we listed it.
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            # The second field, the name in parentheses, may itself contain spaces and parentheses.
            fields = stat[stat.rindex(b")") + 2 :].split()
            everyone[pid] = Process(
                pid=pid,
                state=fields[0].decode(),
                cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
                rss_bytes=int(fields[21]) * _PAGE,
                threads=int(fields[17]),
            )
            children.setdefault(int(fields[1]), []).append(everyone[pid])
    wanted = list(dict.fromkeys(roots))
    return {
        root: list(_below(everyone[root], children, set(wanted) - {root})) if root in everyone else []
        for root in wanted
    }


def _below(process: Process, children: dict[int, list[Process]], others: set[int]) -> Iterator[Process]:
    yield process
    for child in children.get(process.pid, ()):
        if child.pid not in others:
            yield from _below(child, children, others)
