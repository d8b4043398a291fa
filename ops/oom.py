"""Whether the kernel has killed for lack of memory: from the cgroup's counter and the kernel's log.

    watch = OomWatch()
    …                                   # a child ends by SIGKILL
    watch.explain({child_pid, …})       # "the kernel killed pid 17 for lack of memory"

Either source may be unreadable (another user's cgroup, a container without /dev/kmsg); then nothing is
claimed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_LOG = Path("/dev/kmsg")
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory).*?Killed process (\d+)", re.DOTALL)
_RECORD = 8192  # bytes; the kernel gives one record a read, never longer than this


class OomWatch:
    """Remembers how many kills had been counted when it was made, and where the kernel's log ended."""

    def __init__(self, cgroups: Path = _CGROUPS, kernel_log: Path = _KERNEL_LOG) -> None:
        """Take note of the present state."""
        self._counters = _counters(cgroups, Path("/proc/self/cgroup"))
        self._before = self._count()
        self._log = -1
        with suppress(OSError):
            self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
            if kernel_log == _KERNEL_LOG:
                os.lseek(self._log, 0, os.SEEK_END)
        self._killed: set[int] = set()

    def close(self) -> None:
        """Let go of the kernel's log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def kills(self) -> int:
        """Kills for lack of memory in this process's cgroup since the watch began."""
        return max(self._count() - self._before, 0)

    def explain(self, pids: Collection[int]) -> str | None:
        """What the kernel says of the end of one of `pids` (those of a tree that was killed)."""
        self._read_log()
        named = sorted(self._killed & set(pids))
        if named:
            return f"the kernel killed pid {named[0]} for lack of memory"
        if count := self.kills():
            return f"the kernel has killed {count} process(es) of this cgroup for lack of memory meanwhile"
        return None

    def _count(self) -> int:
        total = 0
        for path in self._counters:
            with suppress(OSError, ValueError):
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        total += int(value)
        return total

    def _read_log(self) -> None:
        while self._log >= 0:
            try:
                record = os.read(self._log, _RECORD)
            except BlockingIOError:  # the end for now
                return
            except BrokenPipeError:  # records were overwritten before they were read; the next one is there
                continue
            except OSError:  # a system that opens it and does not give it
                self.close()
                return
            if not record:
                return
            self._killed.update(int(pid) for pid in _KILLED.findall(record.decode(errors="replace")))


def _counters(root: Path, membership: Path) -> list[Path]:
    """The files that count kills: version 2's memory.events, or version 1's memory.oom_control."""
    found = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if number == "0":
                candidates = [root / inside / "memory.events", root / "unified" / inside / "memory.events"]
            elif "memory" in controllers.split(","):
                candidates = [root / "memory" / inside / "memory.oom_control"]
                # In a container its own cgroup is mounted as the root.
                candidates.append(root / "memory" / "memory.oom_control")
            else:
                continue
            found += [path for path in candidates if path.is_file()][:1]
    return found
