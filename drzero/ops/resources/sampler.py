"""Samples what each component of a run uses, every few seconds, as JSON lines.

`cpu_share` is CPU seconds per second. `cpu_s`, `read_mb`, `write_mb` and `net_…` count up.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from drzero.ops.process.tree import Process, descendants
from drzero.ops.records import append_json_lines
from drzero.ops.resources.cgroup import memory_free
from drzero.ops.resources.gpu import Gpus, GpuSample

_MB = 1 << 20


class Sampler:
    """Appends samples to a file, keeps the last ones, and samples the disk that holds the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gpus = Gpus()
        self._before: dict[str, tuple[float, float]] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.processes: list[Process] = []  # of all components in the last sample
        self.pids: set[int] = set()  # of these and of all earlier ones

    def sample(self, roots: Mapping[str, int], now: float, states: Mapping[str, str] | None = None) -> None:
        """Sample the process trees of `roots` (pid by component). `states` has the health of services."""
        trees = descendants(roots.values())
        self.processes = [process for tree in trees.values() for process in tree]
        self.pids |= {process.pid for process in self.processes}
        gpus = self._gpus.read()
        records = [self._component(name, trees[pid], gpus, now) for name, pid in roots.items()]
        for record in records:
            if state := (states or {}).get(record["component"]):
                record["state"] = state
        received = sent = 0
        with suppress(OSError, RuntimeError, ValueError):  # /proc/net/dev is missing or malformed
            # All interfaces including loopback, because our services are local.
            if counts := psutil.net_io_counters():
                received, sent = counts.bytes_recv, counts.bytes_sent
        shown = ("name", "used_mb", "total_mb", "busy_percent")
        records.append(
            {
                "time": round(now, 2),
                "component": "host",
                "load": os.getloadavg()[0],
                "memory_free_mb": memory_free() // _MB,
                "disk_free_gb": disk_free_gb(self._path.parent),
                "net_in_mb": received // _MB,
                "net_out_mb": sent // _MB,
                "gpus": [{name: getattr(gpu, name) for name in shown} for gpu in gpus],
            }
        )
        self.last = {record["component"]: record for record in records}
        append_json_lines(self._path, *records)

    def _component(
        self, name: str, processes: list[Process], gpus: list[GpuSample], now: float
    ) -> dict[str, Any]:
        cpu_s = sum(process.cpu_s for process in processes)
        before = self._before.get(name)
        self._before[name] = (now, cpu_s)
        # The sum may fall, because it no longer has the seconds of processes that ended.
        share = max(cpu_s - before[1], 0.0) / (now - before[0]) if before and now > before[0] else 0.0
        moved = [process.io_bytes() for process in processes]
        pids = {process.pid for process in processes}
        return {
            "time": round(now, 2),
            "component": name,
            "pids": len(processes),
            "cpu_s": round(cpu_s, 2),
            "cpu_share": round(share, 3),
            "rss_mb": sum(process.rss_bytes for process in processes) // _MB,
            "threads": sum(process.threads for process in processes),
            "read_mb": sum(read for read, _ in moved) // _MB,
            "write_mb": sum(written for _, written in moved) // _MB,
            "gpu_mb": sum(mb for gpu in gpus for pid, mb in gpu.memory_mb_of.items() if pid in pids),
        }


def disk_free_gb(folder: Path) -> float | None:
    """Return the free space of the file system that holds `folder`, or None if unknown."""
    with suppress(OSError):
        status = os.statvfs(folder)
        return round(status.f_bavail * status.f_frsize / 1e9, 3)
    return None
