"""What this process's cgroup (version 1 or 2) allows: memory (/proc/meminfo shows the host's), and kills."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from drzero.ops.process.child import describe_exit

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_KERNEL_LOG = Path("/dev/kmsg")
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory).*?Killed process (\d+)", re.DOTALL)


def memory_limit(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return how many bytes this cgroup's processes may use."""
    limits = [limit for limit, _ in _limits(cgroups, membership)]
    return min([psutil.virtual_memory().total, *limits])


def memory_free(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes left. A cgroup's file cache counts as free because the kernel reclaims it."""
    left = [limit - used for limit, used in _limits(cgroups, membership)]
    return max(min([psutil.virtual_memory().available, *left]), 0)


class OomWatch:
    """Counts the kernel's kills for lack of memory from now on, and finds who was killed."""

    def __init__(
        self, cgroups: Path = _CGROUPS, kernel_log: Path = _KERNEL_LOG, membership: Path = _MEMBERSHIP
    ) -> None:
        self._cgroups, self._membership = cgroups, membership
        self._before = self._count()
        self._log = -1
        with suppress(OSError):
            self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
            if kernel_log == _KERNEL_LOG:
                os.lseek(self._log, 0, os.SEEK_END)
        self._killed: set[int] = set()

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def explain(self, pids: Collection[int]) -> str | None:
        """Return the kernel's reason for killing one of `pids`, or None."""
        if named := self.named(pids):
            return named
        if (count := self._count() - self._before) > 0:
            return f"the kernel has killed {count} process(es) of this cgroup for lack of memory meanwhile"
        return None

    def named(self, pids: Collection[int]) -> str | None:
        """Return the kernel's own word that it killed one of `pids`, or None."""
        while self._log >= 0:
            try:
                record = os.read(self._log, 8192)  # one record, never longer than this
            except BlockingIOError:  # no more records yet
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:  # some systems allow opening but not reading
                self.close()
                break
            if not record:
                break
            self._killed.update(int(pid) for pid in _KILLED.findall(record.decode(errors="replace")))
        named = self._killed & set(pids)
        return f"the kernel killed pid {min(named)} for lack of memory" if named else None

    def describe_exit(self, code: int, pids: Collection[int]) -> str:
        """Say how the process tree `pids` ended, with the kernel's reason if it killed one."""
        why = self.explain(pids) if code in (-9, 137) else None
        return describe_exit(code) + (f": {why}" if why else "")

    def _count(self) -> int:
        total = 0
        for own, above, files in _hierarchies(self._cgroups, self._membership):
            # Parents also count the kills of siblings. In a container of version 1 the root is its own group.
            folders = [*own, *above[-1:]] if files is _VERSION_1 else own
            counts = (_field(folder / files.kills, "oom_kill") for folder in folders)
            total += next((count for count in counts if count is not None), 0)
        return total


class _Files(NamedTuple):
    limit: str
    used: str
    cache: str
    kills: str


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


def _hierarchies(cgroups: Path, membership: Path) -> Iterator[tuple[list[Path], list[Path], _Files]]:
    """Yield where this process's memory cgroup may be, its parents (nearest first), and its file names."""
    with suppress(OSError):
        for line in filter(None, membership.read_text().split("\n")):
            number, controllers, path = line.split(":", 2)
            if number == "0":
                roots, files = [cgroups, cgroups / "unified"], _VERSION_2
            elif "memory" in controllers.split(","):
                roots, files = [cgroups / "memory"], _VERSION_1
            else:
                continue
            own = [root / path.lstrip("/") for root in roots]
            above = [
                folder
                for root, group in zip(roots, own, strict=True)
                for folder in group.parents
                if folder.is_relative_to(root)
            ]
            yield own, above, files


def _limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes, without the file cache, of each cgroup that has a limit."""
    for own, above, files in _hierarchies(cgroups, membership):
        for folder in (*own, *above):
            with suppress(OSError, ValueError):  # "max" means no limit
                limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
                yield limit, used - (_field(folder / "memory.stat", files.cache) or 0)


def _field(path: Path, name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().split("\n"):
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None
