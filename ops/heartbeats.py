"""Which phase a run is in, since when, and how long it may stay silent there.

The run's driver appends a line `{"time": unix seconds, "step": n, "phase": "rollout"}` whenever it enters a
phase. From one line to the next is one *occurrence* of the phase; its *silence* is the longest stretch in it
without any sign of progress (for a phase without counters, all of it).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Beat:
    """The entry into a phase."""

    time: float
    step: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class PhaseLimits:
    """How long a phase may go without progress, in seconds."""

    cold_start_s: float = 300.0
    """For a phase that has not been through once: compilation, first contact, cold caches."""
    floor_s: float = 60.0
    """Never less than this afterwards."""
    factor: float = 2.0
    """Times what is usual."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Limits of single phases, whatever is usual."""

    def limit_s(self, phase: str, durations: list[float], silences: list[float]) -> float:
        """The limit, given how the phase went before.

        Usual is the median of its durations; where counters tell progress within the phase, its longest
        silence so far if that is less, so that a long phase need not be silent for twice its length.
        """
        if phase in self.fixed:
            return self.fixed[phase]
        if not durations:
            return self.cold_start_s
        usual = min(statistics.median(durations), max(silences))
        return max(self.floor_s, self.factor * usual)


class PhaseClock:
    """Follows the heartbeats of one start of a run, and the progress that it is told of."""

    def __init__(
        self, path: Path, limits: PhaseLimits, started: float, first_phase: str = "start-up"
    ) -> None:
        """Follow `path` from its present end; until a beat comes, `first_phase` began at `started`."""
        self._path = path
        self._limits = limits
        self._offset = path.stat().st_size if path.exists() else 0
        self._durations: defaultdict[str, list[float]] = defaultdict(list)
        self._silences: defaultdict[str, list[float]] = defaultdict(list)
        self._longest = 0.0
        self.entered: set[str] = set()
        """Phases that were begun since."""
        self.beat = Beat(started, 0, first_phase)
        self.last_progress = started

    def read(self) -> None:
        """Take in the beats that have come since."""
        with suppress(OSError):
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    self._enter(Beat(float(record["time"]), int(record["step"]), str(record["phase"])))

    def progressed(self, now: float) -> None:
        """Something was finished within the phase."""
        self._longest = max(self._longest, now - self.last_progress)
        self.last_progress = now

    def forgive(self, seconds: float) -> None:
        """Nobody could have done anything for so long: the whole machine slept."""
        self.last_progress += seconds

    def silent_s(self, now: float) -> float:
        """Seconds without a sign of progress."""
        return now - self.last_progress

    def limit_s(self) -> float:
        """How many of them are allowed in the present phase."""
        phase = self.beat.phase
        return self._limits.limit_s(phase, self._durations[phase], self._silences[phase])

    def _enter(self, beat: Beat) -> None:
        self.progressed(beat.time)
        self._durations[self.beat.phase].append(beat.time - self.beat.time)
        self._silences[self.beat.phase].append(self._longest)
        self._longest = 0.0
        self.entered.add(beat.phase)
        self.beat, self.last_progress = beat, beat.time
