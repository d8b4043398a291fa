"""The programs that share this machine's memory with a run."""

from collections.abc import Collection

import psutil

_SHOWN, _LEAST = 3, 0.2 * 2**30


def largest_others(own: Collection[int] = ()) -> str:
    """Name the largest programs outside of `own` and of this process's family, or return an empty string."""
    me = psutil.Process()
    family = {*own, me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    held: dict[int, tuple[int, str]] = {}
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]  # None without permission
        if process.pid not in family and memory and (private := memory.rss - memory.shared) >= _LEAST:
            held[process.pid] = private, str(process.info["name"])
    largest = sorted(held.items(), key=lambda item: -item[1][0])[:_SHOWN]
    return ", ".join(f"{name} {size / 2**30:.1f} GiB (pid {pid})" for pid, (size, name) in largest)
