"""The flow monitor: how samples go through a run, as a stream of snapshots, and now and then as a line.

    with FlowMonitor(run_dir / FLOW_FILE, sources, waits_on, title="flow"):
        …

It is a thread of the supervisor: it reads what the run's processes write down and what its services count,
asks nothing of the trainer, and goes on when the trainer hangs. What the stages mean is the caller's matter.

The stream is `RUN_DIR/flow.jsonl`, one object a line, every `every_s` seconds:

    {"time": unix seconds,
     "stages": {NAME: {"depth": now in it or null, "oldest_age_s": of them or null, "in": so far,
                       "out": so far, "dropped": so far, "errors": so far,
                       "capacity"?: …, "work"?: …, "still_s"?: …}},
     "samples": {"asked", "produced", "accepted", "invalid", "failed", "stale", "filtered", "in_flight",
                 "lost"},
     "rates": {"produced": a second, "accepted", "invalid", "stale"},
     "waiting": {"stage", "have", "want", "since_s"} or null,     # who waits for a batch, and how full it is
     "warmup": true until something has been trained on,
     "ended": whether the trainer has come to its end,
     "about": {"step", "mode", "staleness": {…}, …},
     "silent_s": since the trainer last wrote its counts,
     "verdicts": [{"check", "stage", "text", "action"}, …]}       # see ops.flow_checks

`samples`, `rates` are null as long as nothing counts them. `ops.flow_checks` says what the numbers mean.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ops.flow_checks import Limits, Samples, Snapshot, Stage, Verdict, Waiting, WaitsOn, follow, judge
from ops.health import read_counters
from ops.logs import say
from ops.progress import Worker, read_workers

FLOW_FILE = "flow.jsonl"
_RATES = ("produced", "accepted", "invalid", "stale")

Source = Callable[[float], Snapshot | None]
"""What one place knows at a given time; None when it knows nothing (yet)."""


# Sources ----------------------------------------------------------------------------------------------------


def counters_source(path: Path, since: float) -> Source:
    """What a process of the run writes to `path`; nothing of a file that is older than `since`."""

    def read(now: float) -> Snapshot | None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["time"] >= since:
                return _snapshot(record, now)
        return None

    return read


def _snapshot(record: Mapping[str, Any], now: float) -> Snapshot:
    waiting = record.get("waiting")
    if waiting is not None:
        waited = max(record["time"] - waiting["since"], 0.0)
        waiting = Waiting(waiting["stage"], waiting["have"], waiting["want"], waited)
    return Snapshot(
        time=record["time"],
        stages={name: Stage.from_dict(stage, record["time"]) for name, stage in record["stages"].items()},
        samples=Samples(**record["samples"]) if record.get("samples") else None,
        waiting=waiting,
        warmup=bool(record.get("warmup")),
        silent_s=max(now - record["time"], 0.0),
        ended=bool(record.get("ended")),
        about=record.get("about", {}),
    )


def workers_source(folder: Path, kinds: Mapping[str, str], since: float, work: Mapping[str, str]) -> Source:
    """Calls in flight by the progress files of workers: `kinds` names the stage of each kind of call.

    `work` names the stage whose progress a kind counts that is never open, such as tokens.
    """

    def read(now: float) -> Snapshot | None:
        # A worker that has ended stays in the folder, and what it did has been done; its calls are gone.
        workers = [worker for worker in read_workers(folder, now) if now - worker.silent_s >= since]
        if not workers:
            return None
        stages = {stage: _calls(workers, kind, now) for kind, stage in kinds.items()}
        for kind, stage in work.items():
            done = sum(worker.done.get(kind, 0.0) for worker in workers)
            stages[stage] = replace(stages.get(stage, Stage(depth=0, at=now)), work=done)
        return Snapshot(time=now, stages={name: stage for name, stage in stages.items() if stage.came})

    return read


def _calls(workers: Sequence[Worker], kind: str, now: float) -> Stage:
    ages = [
        call.age_s + worker.silent_s
        for worker in workers
        if Path(f"/proc/{worker.pid}").exists()
        for call in worker.calls
        if call.kind == kind
    ]
    done = sum(worker.done.get(kind, 0.0) for worker in workers)
    failed = sum(worker.failed.get(kind, 0.0) for worker in workers)
    return Stage(
        depth=len(ages),
        oldest_age_s=max(ages, default=None),
        came=done + failed + len(ages),
        out=done,
        errors=failed,
        at=now,
    )


@dataclass(frozen=True)
class QueueMetrics:
    """Names on a service's Prometheus page that describe its queue; labels are summed up."""

    depth: str
    out: str | None = None
    dropped: str | None = None
    errors: str | None = None


def service_source(name: str, url: str, metrics: QueueMetrics) -> Source:
    """The queue of a service by its own counters; nothing while it does not answer."""

    def read(now: float) -> Snapshot | None:
        counters = read_counters(url)
        if metrics.depth not in counters:
            return None

        def count(metric: str | None) -> float:
            return counters.get(metric, 0.0) if metric else 0.0

        depth, out, dropped = count(metrics.depth), count(metrics.out), count(metrics.dropped)
        stage = Stage(
            depth=depth,
            came=depth + out + dropped,
            out=out,
            dropped=dropped,
            errors=count(metrics.errors),
            at=now,
        )
        return Snapshot(time=now, stages={name: stage})

    return read


# The monitor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FlowTimes:
    """How often it looks and tells, in seconds."""

    every_s: float = 5.0
    tell_every_s: float = 30.0


class FlowMonitor:
    """Context manager: a thread that looks, writes and tells until the end, when it looks once more."""

    def __init__(
        self,
        path: Path,
        sources: Sequence[Source],
        waits_on: WaitsOn,
        times: FlowTimes | None = None,
        limits: Limits | None = None,
        tell: Callable[[str, str], None] = say,
    ) -> None:
        """Write to `path`, which is appended to; `waits_on` says what each stage cannot go on without."""
        self._path = path
        self._sources = tuple(sources)
        self._waits_on = waits_on
        self._times = times or FlowTimes()
        self._limits = limits or Limits()
        self._tell = tell
        self._told_at = 0.0
        self._told: Snapshot | None = None
        self._standing: dict[tuple[str, str], float] = {}
        self.last: Snapshot | None = None
        self.verdicts: list[Verdict] = []
        """Every verdict so far, once for as long as it stood."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)

    def __enter__(self) -> FlowMonitor:
        """Begin to look."""
        self._told_at = time.time()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop looking."""
        self._end.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        failure = ""
        while not self._end.wait(self._times.every_s):
            try:
                self.look(time.time())
                failure = ""
            except Exception as error:  # whatever a file or a page held, the next look may succeed
                if failure != repr(error):
                    failure = repr(error)
                    self._tell("flow", f"cannot look: {failure}")

    def look(self, now: float) -> Snapshot | None:
        """Take one snapshot, write it down, and tell what is new or due; None when there is nothing yet."""
        read = [snapshot for source in self._sources if (snapshot := source(now)) is not None]
        if not read:
            return None
        before, taken = self.last, merge(read, now)
        if before is not None and before.ended and taken.ended:
            return before  # what is being taken down is no flow
        snapshot = self.last = follow(before, taken)
        verdicts = judge(before, snapshot, self._waits_on, self._limits) if before else []
        self._write(before, snapshot, verdicts)
        if not snapshot.ended:
            self._tell_verdicts(verdicts, now)
        if now - self._told_at >= self._times.tell_every_s:
            # Rates are those since the last line: between two looks they would jump.
            self._tell("flow", line(self._told or before, snapshot))
            self._told_at, self._told = now, snapshot
        return snapshot

    def _tell_verdicts(self, verdicts: Sequence[Verdict], now: float) -> None:
        """A line for each that is new, and one when it has not been seen for as long as lines are apart."""
        for verdict in verdicts:
            if (verdict.check, verdict.stage) not in self._standing:
                self.verdicts.append(verdict)
                self._tell("flow", str(verdict))
            self._standing[verdict.check, verdict.stage] = now
        for (check, stage), seen in list(self._standing.items()):
            if now - seen > self._times.tell_every_s:
                del self._standing[check, stage]
                self._tell("flow", f"{check}, {stage}: over")

    def _write(self, before: Snapshot | None, now: Snapshot, verdicts: Sequence[Verdict]) -> None:
        record = to_record(before, now) | {"verdicts": [asdict(verdict) for verdict in verdicts]}
        with suppress(OSError):  # a full disk loses lines, never the run
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def merge(read: Sequence[Snapshot], now: float) -> Snapshot:
    """One snapshot of what several sources know; of what two of them know, the first is believed."""
    stages: dict[str, Stage] = {}
    about: dict[str, Any] = {}
    for part in read:
        stages = {**part.stages, **stages}
        about = {**part.about, **about}
    samples = next((part.samples for part in read if part.samples), None)
    waiting = next((part.waiting for part in read if part.waiting), None)
    return Snapshot(
        time=now,
        stages=stages,
        samples=samples,
        waiting=waiting,
        warmup=any(part.warmup for part in read),
        silent_s=max(part.silent_s for part in read),
        ended=any(part.ended for part in read),
        about=about,
    )


def to_record(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """The JSON form of a snapshot, see the module."""
    samples = None
    if now.samples:
        samples = {name: value for name, value in asdict(now.samples).items() if name != "settled"}
        samples["lost"] = max(now.samples.lost, 0.0)
    return {
        "time": round(now.time, 2),
        "stages": {name: stage.to_dict() for name, stage in now.stages.items()},
        "samples": samples,
        "rates": rates(before, now),
        "waiting": asdict(now.waiting) if now.waiting else None,
        "warmup": now.warmup,
        "silent_s": round(now.silent_s, 1),
        "ended": now.ended,
        "about": dict(now.about),
    }


def rates(before: Snapshot | None, now: Snapshot) -> dict[str, float] | None:
    """Samples a second since the snapshot before."""
    if before is None or before.samples is None or now.samples is None or now.time <= before.time:
        return None
    seconds = now.time - before.time
    return {
        name: round(max(getattr(now.samples, name) - getattr(before.samples, name), 0.0) / seconds, 3)
        for name in _RATES
    }


def line(before: Snapshot | None, now: Snapshot) -> str:
    """A snapshot in one line: rates, what every stage holds and for how long, who waits, and staleness."""
    parts = []
    if told := rates(before, now):
        parts.append(" ".join(f"{name} {rate:.2g}/s" for name, rate in told.items()))
    held = [_held(name, stage) for name, stage in now.stages.items() if stage.depth is not None]
    parts.append(", ".join(held) or "no stage is known yet")
    if now.waiting:
        what = "warm-up" if now.warmup else "next batch"
        waiting = now.waiting
        parts.append(f"{what} {waiting.have:g}/{waiting.want:g} for {waiting.since_s:.0f} s")
    if staleness := now.about.get("staleness"):
        parts.append(_staleness(staleness))
    step = now.about.get("step")
    return (f"step {step}: " if step is not None else "") + " | ".join(parts)


def _held(name: str, stage: Stage) -> str:
    room = f"/{stage.capacity:g}" if stage.capacity else ""
    age = f" ({stage.oldest_age_s:.0f} s)" if stage.depth and stage.oldest_age_s is not None else ""
    return f"{name} {stage.depth:g}{room}{age}"


def _staleness(staleness: Mapping[str, Any]) -> str:
    """Steps behind: the most in the buffer, the mean of the last batch, the limit; and groups evicted."""
    limit = "no limit" if staleness.get("limit") is None else f"limit {staleness['limit']}"
    waiting, trained = staleness.get("waiting_max", 0), staleness.get("trained_mean", 0)
    return f"behind {waiting:g}, trained {trained:.2g} ({limit}), evicted {staleness.get('evicted', 0):g}"
