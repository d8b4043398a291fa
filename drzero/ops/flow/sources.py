"""The sources of a snapshot: what one place knows at a unix time, or None.
They never ask the trainer, so they work while it hangs.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drzero.ops.flow.snapshot import FlowPoint, Samples, Snapshot, Waiting
from drzero.ops.flow.workers import call_point, read_workers
from drzero.ops.services.health import read_counters

Source = Callable[[float], Snapshot | None]


def counters_source(path: Path, since: float) -> Source:
    """Read the counts that the trainer's process writes to `path`, unless they are older than `since`."""

    def read(now: float) -> Snapshot | None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if (at := record["time"]) < since:
                return None
            if (waiting := record.get("waiting")) is not None:
                waited = max(at - waiting["since"], 0.0)
                filtered = waiting.get("filtered", 0.0)
                waiting = Waiting(waiting["point"], waiting["have"], waiting["want"], waited, filtered)
            return Snapshot(
                time=at,
                points={name: FlowPoint.from_dict(point, at) for name, point in record["points"].items()},
                samples=Samples(**record["samples"]) if record.get("samples") else None,
                waiting=waiting,
                warmup=bool(record.get("warmup")),
                silent_s=max(now - at, 0.0),
                ended=bool(record.get("ended")),
                about=record.get("about", {}),
            )
        return None

    return read


def workers_source(folder: Path, kinds: Collection[str], since: float, work: Mapping[str, str]) -> Source:
    """Read each kind of call in flight as a flow point. `work` maps other kinds (tokens) to their point."""

    def read(now: float) -> Snapshot | None:
        workers = [
            # The file of an ended worker stays: keep what it finished, drop its open calls.
            worker if Path(f"/proc/{worker.pid}").exists() else replace(worker, calls=())
            for worker in read_workers(folder, now)
            if now - worker.silent_s >= since
        ]
        if not workers:
            return None
        points = {kind: call_point(workers, kind, now) for kind in kinds}
        for kind, name in work.items():
            done = sum(worker.done.get(kind, 0.0) for worker in workers)
            points[name] = replace(points.get(name, FlowPoint(depth=0, at=now)), work=done)
        return Snapshot(time=now, points={name: point for name, point in points.items() if point.came})

    return read


@dataclass(frozen=True)
class QueueMetrics:
    """Names of the metrics on a service's Prometheus page that describe its queue. Labels are summed."""

    depth: str
    out: str | None = None
    dropped: str | None = None
    errors: str | None = None


def service_source(name: str, url: str, metrics: QueueMetrics) -> Source:
    """Read a service's queue from its own counters."""

    def read(now: float) -> Snapshot | None:
        counters = read_counters(url)
        if metrics.depth not in counters:
            return None
        depth, out, dropped, errors = (
            counters.get(metric, 0.0) if metric else 0.0
            for metric in (metrics.depth, metrics.out, metrics.dropped, metrics.errors)
        )
        came = depth + out + dropped
        point = FlowPoint(depth=depth, came=came, out=out, dropped=dropped, errors=errors, at=now)
        return Snapshot(time=now, points={name: point})

    return read


def merge(read: Sequence[Snapshot], now: float) -> Snapshot:
    """Merge the sources' snapshots. On conflict the first source wins."""
    points: dict[str, FlowPoint] = {}
    about: dict[str, Any] = {}
    for part in read:
        points = {**part.points, **points}
        about = {**part.about, **about}
    return Snapshot(
        time=now,
        points=points,
        samples=next((part.samples for part in read if part.samples), None),
        waiting=next((part.waiting for part in read if part.waiting), None),
        warmup=any(part.warmup for part in read),
        silent_s=max(part.silent_s for part in read),
        ended=any(part.ended for part in read),
        about=about,
    )
