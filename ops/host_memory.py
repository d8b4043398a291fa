"""Memory of this machine as a process may use it: the machine's, or less where a container has a limit.

    memory_limit(), memory_free()       # bytes

A container's /proc/meminfo tells the memory of its host; what ends a run there is its cgroup's limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that this process and its like may use at most."""
    limits = [limit for limit, _, _ in _limited(cgroups, membership)]
    return min([psutil.virtual_memory().total, *limits])


def memory_free(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that are left; a cgroup's file cache counts as free, since the kernel takes it back."""
    left = [limit - used + cache for limit, used, cache in _limited(cgroups, membership)]
    return max(min([psutil.virtual_memory().available, *left]), 0)


def _limited(cgroups: Path, membership: Path) -> Iterator[tuple[int, int, int]]:
    """Limit, use and file cache of each cgroup with a limit that this process is in."""
    for folder, limit, used, cache in _places(cgroups, membership):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            yield int((folder / limit).read_text()), int((folder / used).read_text()), _cache(folder, cache)


def _places(cgroups: Path, membership: Path) -> Iterator[tuple[Path, str, str, str]]:
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            # The limits of the groups above count as well. In a container its own is mounted as the root.
            if number == "0":
                for folder in _upwards(cgroups / inside, cgroups):
                    yield folder, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                root = cgroups / "memory"
                for folder in _upwards(root / inside, root):
                    yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _upwards(folder: Path, root: Path) -> Iterator[Path]:
    yield folder
    while folder != root and root in folder.parents:
        folder = folder.parent
        yield folder


def _cache(folder: Path, name: str) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
