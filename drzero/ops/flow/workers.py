"""The finished work and open calls of a run's workers. Each rewrites its progress file every second:

`{"time", "pid", "title", "done": {kind: count}, "failed": {…}, "seconds": {kind: of all finished}, "causes":
{kind: {exception: count}}, "open": [[kind, since, limit_s or null], …], "loops": [last tick, …]}`
"""

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drzero.ops.flow.snapshot import FlowPoint
from drzero.ops.grouping import by_key

SILENT_S = 5.0  # a worker that has not written for this long is stopped, or something holds its interpreter


@dataclass(frozen=True)
class OpenCall:
    """A call that a worker waits for. `limit_s` is the call's own deadline, if any."""

    kind: str
    pid: int
    age_s: float
    limit_s: float | None = None


@dataclass(frozen=True)
class Worker:
    """One worker's file."""

    pid: int
    title: str
    done: dict[str, float]
    failed: dict[str, float]
    calls: tuple[OpenCall, ...]
    silent_s: float  # seconds since it last wrote
    loop_silent_s: float | None  # seconds since its slowest event loop last ran; None without one
    seconds: dict[str, float] = field(default_factory=dict)  # total seconds of the finished calls, by kind
    causes: dict[str, dict[str, int]] = field(default_factory=dict)  # exceptions of the failed calls, by kind


def read_workers(folder: Path, now: float, pids: Collection[int] | None = None) -> list[Worker]:
    """Read the workers, or only those in `pids`. Half-written files are skipped."""
    workers = []
    with suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
                if pids is not None and record["pid"] not in pids:
                    continue
                # Take ages at the time of writing, because a stopped worker is not waiting for others.
                written, pid = float(record["time"]), int(record["pid"])
                ticks = [float(tick) for tick in record["loops"]]
                calls = tuple(
                    OpenCall(str(kind), pid, max(written - since, 0.0), limit)
                    for kind, since, limit in record["open"]
                )
                workers.append(
                    Worker(
                        pid=pid,
                        title=str(record["title"]),
                        done={str(kind): float(count) for kind, count in record["done"].items()},
                        failed={str(kind): float(count) for kind, count in record["failed"].items()},
                        calls=calls,
                        silent_s=max(now - written, 0.0),
                        loop_silent_s=max(written - min(ticks), 0.0) if ticks else None,
                        seconds={str(kind): float(s) for kind, s in record.get("seconds", {}).items()},
                        causes={str(kind): dict(of) for kind, of in record.get("causes", {}).items()},
                    )
                )
    return workers


def finished(workers: Sequence[Worker]) -> dict[str, float]:
    """Return the finished work of all workers, by kind."""
    kinds = {kind for worker in workers for kind in worker.done}
    return {kind: sum(worker.done.get(kind, 0.0) for worker in workers) for kind in kinds}


def open_calls(workers: Sequence[Worker]) -> list[OpenCall]:
    """Return the open calls of all workers, oldest first."""
    return sorted((call for worker in workers for call in worker.calls), key=lambda call: -call.age_s)


def ages(calls: Iterable[OpenCall]) -> dict[str, list[float]]:
    """Return the ages of calls in seconds, by kind."""
    by_kind = by_key(calls, lambda call: call.kind)
    return {kind: [call.age_s for call in of] for kind, of in by_kind.items()}


def call_point(workers: Sequence[Worker], kind: str, now: float) -> FlowPoint:
    """Return the calls of one kind as a flow point."""
    waited = [
        call.age_s + worker.silent_s for worker in workers for call in worker.calls if call.kind == kind
    ]
    done = sum(worker.done.get(kind, 0.0) for worker in workers)
    failed = sum(worker.failed.get(kind, 0.0) for worker in workers)
    return FlowPoint(
        depth=len(waited),
        oldest_age_s=max(waited, default=None),
        came=done + failed + len(waited),
        out=done,
        errors=failed,
        at=now,
    )


def worker_lines(before: Sequence[Worker], now: Sequence[Worker], seconds: float) -> list[str]:
    """Describe each busy worker in a line, with rates over the `seconds` since `before`."""
    earlier = {worker.pid: worker.done for worker in before}
    lines = []
    for worker in now:
        parts = []
        for kind in dict.fromkeys((*worker.done, *worker.failed, *(call.kind for call in worker.calls))):
            done = worker.done.get(kind, 0.0)
            rate = max(done - earlier.get(worker.pid, {}).get(kind, 0.0), 0.0) / max(seconds, 1e-9)
            part = f"{kind} {done:g} ({rate:.2g}/s)"
            if failed := worker.failed.get(kind):
                part += f", {failed:g} failed"
            if ages_s := [call.age_s for call in worker.calls if call.kind == kind]:
                part += f", {len(ages_s)} open for up to {max(ages_s):.0f} s"
            parts.append(part)
        if parts:
            silent = f" | silent for {worker.silent_s:.0f} s" if worker.silent_s > SILENT_S else ""
            name = worker.title.partition("(")[0].strip()
            lines.append(f"{name} {worker.pid}: {' | '.join(parts)}{silent}")
    return lines
