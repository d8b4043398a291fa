"""What counts as movement of a run, and how long each part of it may stand still (`Patience`).

Movement is a new phase, a log line (start-up), a growing folder (save), finished work or a moving flow point.
"""

import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drzero.ops.flow.snapshot import FlowPoint, Snapshot, WaitsOn, far_end, undrained
from drzero.ops.flow.workers import finished, read_workers
from drzero.ops.records import BeatLine, JsonTail
from drzero.ops.services.services import Service

_GONE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long something may stand still, in seconds."""

    cold_start_s: float = 300.0  # the first time: compilation, first contact, cold caches
    floor_s: float = 60.0  # the minimum afterwards
    factor: float = 2.0  # multiplies the usual time
    fixed: Mapping[str, float] = field(default_factory=dict)  # limits of single phases, whatever is usual

    def limit_s(self, usual_s: float | None) -> float:
        """Return the limit if `usual_s` seconds without movement are usual. None means unknown."""
        return self.cold_start_s if usual_s is None else max(self.floor_s, self.factor * usual_s)

    def phase_limit_s(self, phase: str, durations: Sequence[float], silences: Sequence[float]) -> float:
        """Return a phase's limit. Usual is the median of its durations, or its longest silence if shorter."""
        if phase in self.fixed:
            return self.fixed[phase]
        return self.limit_s(min(statistics.median(durations), max(silences)) if durations else None)

    def point_limit_s(self, point: FlowPoint) -> float:
        """Return the limit of a flow point from the longest time that it held something without moving."""
        return self.limit_s(point.usual_s if any(point.moved) else None)


@dataclass(frozen=True)
class Stall:
    """Something that stood still for too long. Kind `asked` is no stall, but a user's question."""

    kind: Literal["phase", "starved", "not drained", "no counts", "alike", "gone", "asked"]
    where: str  # the phase, or the flow point that holds everything up
    text: str
    silent_s: float
    limit_s: float


def flow_stall(
    now: Snapshot, waits_on: WaitsOn, patience: Patience, phase: str = "", phase_limit_s: float = 0.0
) -> Stall | None:
    """Return where the samples stand still. The trainer always gets its current phase's limit."""
    if now.ended:
        return None
    # DAPO's own code ends at ten batches (max_num_gen_batches), which veRL's buffer ignores.
    if now.waiting and now.waiting.has_dropped(10):
        return Stall("alike", now.waiting.point, f"{now.waiting}", now.waiting.since_s, 0.0)
    limit_s = max(patience.floor_s, phase_limit_s)
    if now.silent_s >= limit_s:
        text = f"the trainer's process has written no counts for {now.silent_s:.0f} s"
        return Stall("no counts", "trainer", text, now.silent_s, limit_s)
    if now.waiting and now.waiting.is_short:
        return _starved(now, waits_on, patience, patience.fixed.get(phase, 0.0))
    for name, point in undrained(now).items():
        limit_s = max(patience.point_limit_s(point), phase_limit_s)
        if point.still_s >= limit_s:
            text = f"{name} holds {point.depth:g} and nothing has left it for {point.still_s:.0f} s"
            return Stall("not drained", name, text, point.still_s, limit_s)
    return None


def _starved(now: Snapshot, waits_on: WaitsOn, patience: Patience, least_s: float) -> Stall | None:
    """Blame the far end behind the waiting trainer, if all other work is still too."""
    waiting, least_s = now.waiting, max(least_s, patience.floor_s)
    assert waiting is not None
    busy = [point for point in now.points.values() if point.depth and point.role == "work"]
    if waiting.since_s < least_s or any(point.still_s < least_s for point in busy):
        return None
    name = far_end(now.points, waits_on, waiting.point)
    if name is None or name == waiting.point:
        feeders = waits_on.get(waiting.point) or (waiting.point,)
        text = f"{waiting}, and nothing is on its way from {' or '.join(feeders)}"
        return Stall("starved", feeders[0], text, waiting.since_s, least_s)
    point = now.points[name]
    limit_s = max(patience.point_limit_s(point), least_s)
    if point.still_s < limit_s:
        return None
    age = f", the oldest for {point.oldest_age_s:.0f} s" if point.oldest_age_s else ""
    held = f"{name} holds {point.depth:g}{age} and has finished nothing for {point.still_s:.0f} s"
    return Stall("starved", name, f"{waiting}, and {held}", point.still_s, limit_s)


@dataclass(frozen=True)
class Beat:
    """The start of a phase."""

    time: float
    step: int
    phase: str


class PhaseClock:
    """Knows the trainer's phase from its heartbeats, and since when nothing has moved in it."""

    def __init__(self, path: Path, patience: Patience, started: float) -> None:
        """Follow `path` from its current end. Until the first beat the phase is the start-up."""
        self._tail = JsonTail(path, BeatLine, path.stat().st_size if path.exists() else 0)
        self._patience = patience
        self._durations: defaultdict[str, list[float]] = defaultdict(list)
        self._silences: defaultdict[str, list[float]] = defaultdict(list)
        self._longest = 0.0
        self.entered: set[str] = set()  # phases that began since then
        self.beat = Beat(started, 0, "start-up")
        self.last_movement = started

    def read(self) -> None:
        """Read the new heartbeats."""
        for record in self._tail.read():
            beat = Beat(float(record["time"]), record["step"], record["phase"])
            self.moved(beat.time)
            self._durations[self.beat.phase].append(beat.time - self.beat.time)
            self._silences[self.beat.phase].append(self._longest)
            self._longest = 0.0
            self.entered.add(beat.phase)
            self.beat = beat

    def moved(self, now: float) -> None:
        """Record movement within the phase."""
        self._longest = max(self._longest, now - self.last_movement)
        self.last_movement = now

    def silent_s(self, now: float) -> float:
        """Return the seconds without movement."""
        return now - self.last_movement

    def limit_s(self) -> float:
        """Return how many the current phase may have."""
        phase = self.beat.phase
        return self._patience.phase_limit_s(phase, self._durations[phase], self._silences[phase])


class NewLines:
    """Notices new lines of a log. A repeated warning is not new."""

    _WHEN = re.compile(rb"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d([.,]\d+)?")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._seen: set[int] = set()

    def have_come(self) -> bool:
        """Whether a line has arrived that was never there before, apart from its timestamp."""
        fresh: set[int] = set()
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            # A progress bar rewrites one long line.
            lines = {hash(self._WHEN.sub(b"", line)) for line in re.split(rb"[\r\n]+", new) if line}
            fresh = lines - self._seen
            self._seen = fresh if len(self._seen) > 100_000 else self._seen | fresh
        return bool(fresh)


class RollCall:
    """Notices workers that ended without a replacement."""

    def __init__(self) -> None:
        self._most: Counter[str] = Counter()
        self._role_of: dict[int, str] = {}
        self._missing_since: float | None = None
        self.missing: dict[int, str] = {}  # roles by pid

    def take(self, workers: Mapping[int, str], now: float) -> None:
        """Look at the living workers: the role of each by pid."""
        self._most |= (alive := Counter(workers.values()))
        self._role_of |= workers
        ended = [pid for pid in self._role_of if pid not in workers]
        # The last to end are missing: others were replaced.
        self.missing = {
            pid: role
            for role, count in (self._most - alive).items()
            for pid in [pid for pid in ended if self._role_of[pid] == role][-count:]
        }
        self._missing_since = (self._missing_since or now) if self.missing else None

    def stall(self, now: float) -> Stall | None:
        """Return the missing workers as a stall. A trainer that notices has a moment to end by itself."""
        if self._missing_since is None or (silent := now - self._missing_since) < _GONE_S:
            return None
        who = ", ".join(f"{role} (pid {pid})" for pid, role in self.missing.items())
        return Stall("gone", who, f"{who} ended, and nothing replaces it", silent, _GONE_S)


def _size(folder: Path, pattern: str) -> int:
    total = 0
    for place in folder.glob(pattern):
        for root, _, names in os.walk(place):
            for name in names:
                with suppress(OSError):
                    total += os.stat(os.path.join(root, name)).st_size
    return total


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Where to read a run's movement."""

    folder: Path
    heartbeats: Path
    progress: Path  # folder of the workers' progress files
    patience: Patience = field(default_factory=Patience)
    counted_phases: frozenset[str] = frozenset()
    """Phases in which finished work of workers and services is movement."""
    writing_phases: Mapping[str, str] = field(default_factory=dict)
    """Phases in which growing folders are movement, with their pattern below `folder`."""
    flow: Callable[[], Snapshot | None] = lambda: None  # returns the flow monitor's last snapshot


class Movement:
    """Follows one start of a run. Poll it every few seconds."""

    def __init__(
        self,
        signs: Signs,
        log_path: Path,
        waits_on: WaitsOn,
        start_phases: frozenset[str] = frozenset({"start-up"}),
    ) -> None:
        """In `start_phases`, new lines in the main command's `log_path` are movement."""
        now = time.time()
        self.signs = signs
        self.clock = PhaseClock(signs.heartbeats, signs.patience, now)
        self._waits_on = waits_on
        self._start_phases = start_phases
        self._lines = NewLines(log_path)
        self._counts: dict[str, float] = {}
        self._written = 0
        self._flow_from = now
        self.is_hidden = False
        """Whether samples stand still, but a recent suspension of the machine may explain it."""

    def poll(self, now: float, services: Sequence[Service]) -> None:
        """Look for movement since the last call."""
        self.clock.read()
        phase, signs, has_moved = self.clock.beat.phase, self.signs, False
        if phase in self._start_phases:
            has_moved = self._lines.have_come()
        elif pattern := signs.writing_phases.get(phase):
            before, self._written = self._written, _size(signs.folder, pattern)
            has_moved = self._written > before
        elif phase in signs.counted_phases:
            counts = finished(read_workers(signs.progress, now))
            for service in services:
                if service.monitor:
                    counts[f"service {service.spec.name}"] = service.monitor.health.worked
            earlier, self._counts = self._counts, counts
            has_moved = any(count > earlier.get(kind, 0.0) for kind, count in counts.items())
        if has_moved:
            self.clock.moved(now)

    def discount_suspension(self, seconds: float, now: float) -> None:
        """Do not count the last `seconds` as silence: the machine was suspended."""
        self.clock.last_movement += seconds
        self._flow_from = now

    def stall(self, now: float) -> Stall | None:
        """Return the phase or samples that ran out of patience, or None."""
        silent, limit, phase = self.clock.silent_s(now), self.clock.limit_s(), self.clock.beat.phase
        self.is_hidden = False
        if silent > limit:
            return Stall("phase", phase, f"nothing has moved in {phase}", silent, limit)
        if (snapshot := self.signs.flow()) is None:
            return None
        stall = flow_stall(snapshot, self._waits_on, self.signs.patience, phase, limit)
        # While the trainer saves, it takes no samples; its growing files are the movement.
        if stall and stall.kind == "not drained" and phase in self.signs.writing_phases:
            return None
        self.is_hidden = stall is not None and now - self._flow_from < stall.limit_s
        return None if self.is_hidden else stall
