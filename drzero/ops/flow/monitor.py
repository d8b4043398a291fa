"""The flow monitor: snapshots of a run's samples as a stream (docs/flow.md) and as log lines."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from drzero.ops.console import detail, say
from drzero.ops.flow.checks import Symptom, find_symptoms
from drzero.ops.flow.snapshot import SUSPENDED_S, Snapshot, WaitsOn, follow
from drzero.ops.flow.sources import Source, merge
from drzero.ops.flow.workers import Worker, read_workers, worker_lines
from drzero.ops.records import append_json_lines


@dataclass(frozen=True, kw_only=True)
class FlowTimes:
    """Seconds between snapshots, between log lines, and before a first batch counts as late."""

    every_s: float = 5.0
    log_every_s: float = 30.0
    floor_s: float = 60.0


class FlowMonitor(threading.Thread):
    """Context manager: a thread that polls the sources, writes the stream and logs."""

    def __init__(
        self,
        path: Path,
        sources: Sequence[Source],
        waits_on: WaitsOn,
        times: FlowTimes,
        log: Callable[[str, str], None] = detail,
        workers: Path | None = None,
    ) -> None:
        """`log` gets the periodic lines. `workers` is a folder, for a line per worker."""
        super().__init__(name="flow", daemon=True)
        self._path = path
        self._sources = tuple(sources)
        self._waits_on = waits_on
        self._times, self._log = times, log
        self._workers, self._were = workers, list[Worker]()
        self._is_warm = False
        self._logged_at = 0.0
        self._logged: Snapshot | None = None
        self._lasting: dict[tuple[str, str], float] = {}
        self.last: Snapshot | None = None
        self.symptoms: list[Symptom] = []  # every symptom so far, once for as long as it lasted
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self._logged_at = time.time()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self.join(5.0)

    def snapshot(self) -> Snapshot | None:
        """The last snapshot, or None."""
        return self.last

    def run(self) -> None:
        """Poll until closed."""
        failure = ""
        while not self._end.wait(self._times.every_s):
            try:
                self.poll(time.time())
                failure = ""
            except Exception as error:  # a malformed file or page; the next poll may succeed
                if failure != repr(error):
                    failure = repr(error)
                    say("flow", f"cannot read the flow: {failure}", "warning")

    def poll(self, now: float) -> Snapshot | None:
        """Take, write and log one snapshot, or return None if no source knows anything."""
        read = [snapshot for source in self._sources if (snapshot := source(now)) is not None]
        if not read:
            return None
        before, taken = self.last, merge(read, now)
        if before is not None and before.ended and taken.ended:
            return before  # the trainer is shutting down
        suspended = before is not None and taken.time - before.time > SUSPENDED_S + self._times.every_s
        snapshot = self.last = follow(before, taken, suspended=suspended)
        symptoms = find_symptoms(before, snapshot, self._waits_on, self._times.floor_s) if before else []
        record = to_record(before, snapshot) | {"symptoms": [asdict(symptom) for symptom in symptoms]}
        append_json_lines(self._path, record)
        if not self._is_warm and (took := snapshot.about.get("warmup_s")) is not None:
            self._is_warm = True
            say("flow", f"warm-up is complete after {took:.1f} s: the first batch is taken")
        if not snapshot.ended:
            for symptom in symptoms:
                if (symptom.check, symptom.point) not in self._lasting:
                    self.symptoms.append(symptom)
                    say("flow", str(symptom), "warning")
                self._lasting[symptom.check, symptom.point] = now
            for (check, point), seen in list(self._lasting.items()):
                if now - seen > self._times.log_every_s:
                    del self._lasting[check, point]
                    say("flow", f"{check}, {point}: over", "warning")
        if now - self._logged_at >= self._times.log_every_s:
            # Rates between two snapshots would jump, so compare with the last line.
            self._log("flow", line(self._logged or before, snapshot))
            self._log_workers(now)
            self._logged_at, self._logged = now, snapshot
        return snapshot

    def _log_workers(self, now: float) -> None:
        if self._workers is None:
            return
        workers = read_workers(self._workers, now)
        for text in worker_lines(self._were, workers, now - self._logged_at):
            self._log("flow", text)
        self._were = workers


def to_record(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON, without its symptoms."""
    samples = None
    if now.samples:
        samples = {name: value for name, value in asdict(now.samples).items() if name != "settled"}
        samples["lost"] = max(now.samples.lost, 0.0)
    return {
        "time": round(now.time, 2),
        "points": {name: point.to_dict() for name, point in now.points.items()},
        "samples": samples,
        "rates": rates(before, now),
        "waiting": asdict(now.waiting) if now.waiting else None,
        "warmup": now.warmup,
        "silent_s": round(now.silent_s, 1),
        "ended": now.ended,
        "about": dict(now.about),
    }


def rates(before: Snapshot | None, now: Snapshot) -> dict[str, float] | None:
    """Return samples per second since the last snapshot."""
    if before is None or before.samples is None or now.samples is None or now.time <= before.time:
        return None
    seconds = now.time - before.time
    return {
        name: round(max(getattr(now.samples, name) - getattr(before.samples, name), 0.0) / seconds, 3)
        for name in ("produced", "accepted", "invalid", "stale", "filtered")
    }


def line(before: Snapshot | None, now: Snapshot) -> str:
    """Describe a snapshot in one line: rates, what each point holds, who waits, staleness."""
    parts = []
    if per_second := rates(before, now):
        parts.append(" ".join(f"{name} {rate:.2g}/s" for name, rate in per_second.items()))
    held = []
    for name, point in now.points.items():
        if point.depth is not None:
            room = f"/{point.capacity:g}" if point.capacity else ""
            age = f" ({point.oldest_age_s:.0f} s)" if point.depth and point.oldest_age_s is not None else ""
            held.append(f"{name} {point.depth:g}{room}{age}")
    parts.append(", ".join(held) or "no point is known yet")
    if waiting := now.waiting:
        what = "warm-up" if now.warmup else "next batch"
        alike = f", {waiting.filtered:g} scored alike" if waiting.filtered else ""
        parts.append(f"{what} {waiting.have:g}/{waiting.want:g} for {waiting.since_s:.0f} s{alike}")
    if staleness := now.about.get("staleness"):
        # Off-policy lag in steps: the most in the buffer, the last batch's mean, the limit; groups evicted.
        limit = "no limit" if staleness.get("limit") is None else f"limit {staleness['limit']}"
        lag = f"behind {staleness.get('waiting_max', 0):g}, trained {staleness.get('trained_mean', 0):.2g}"
        parts.append(f"{lag} ({limit}), evicted {staleness.get('evicted', 0):g}")
    step = now.about.get("step")
    return (f"step {step}: " if step is not None else "") + " | ".join(parts)
