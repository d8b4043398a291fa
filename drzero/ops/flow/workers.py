"""What the workers of a run have finished and wait for, read from the progress files that they write.

Each worker keeps one file in the run's progress folder and updates it every second:
`{"time", "pid", "title", "done": {kind: count}, "failed": {…}, "seconds": {kind: of all that are done},
"causes": {kind: {exception: count}}, "open": [[kind, since, limit_s or null], …], "loops": [last tick, …]}`.
What the kinds mean is defined by the caller.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drzero.ops.flow.snapshot import FlowPoint

SILENT_S = 5.0
"""A worker writes every second: after this long it is stopped, or something holds its interpreter."""


@dataclass(frozen=True)
class OpenCall:
    """A call that a worker waits for; `limit_s` is the deadline that the call itself enforces, if any."""

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
    silent_s: float
    """Since it last wrote: more than a few seconds means stopped, or something holds the interpreter."""
    loop_silent_s: float | None
    """Since its slowest event loop last ran; None without one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What the finished calls of each kind took together."""
    causes: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the failed calls of each kind have raised."""


def read_workers(folder: Path, now: float, pids: Collection[int] | None = None) -> list[Worker]:
    """The workers, only those of `pids` when given; a half-written file is left out."""
    workers = []
    with suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
                if pids is not None and record["pid"] not in pids:
                    continue
                # Ages are those at the time of writing: a stopped worker is not waiting for others.
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
    """Finished work of all workers, by kind."""
    totals: dict[str, float] = {}
    for worker in workers:
        for kind, count in worker.done.items():
            totals[kind] = totals.get(kind, 0.0) + count
    return totals


def open_calls(workers: Sequence[Worker]) -> list[OpenCall]:
    """The open calls of all workers, the oldest first."""
    return sorted((call for worker in workers for call in worker.calls), key=lambda call: -call.age_s)


def ages(calls: Iterable[OpenCall]) -> dict[str, list[float]]:
    """The ages of calls in seconds, by kind."""
    found: dict[str, list[float]] = {}
    for call in calls:
        found.setdefault(call.kind, []).append(call.age_s)
    return found


def call_point(workers: Sequence[Worker], kind: str, now: float) -> FlowPoint:
    """The calls of one kind as a flow point."""
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
    """A line for each worker: what it has finished of each kind, how fast since `before`, and what it holds.

    `seconds` are those between the two readings; a worker that does nothing and waits for nothing has none.
    """
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
