"""A service that runs elsewhere: a run watches it, but never starts or ends it.

If it stops answering, calls fail at their deadlines, and too many failures end the run.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from drzero.ops.process.logs import EventLog
from drzero.ops.services.health import CpuTime, HealthCheck, HealthMonitor, ask

SILENT = "silent"  # state and event of a service that does not answer


@dataclass(frozen=True, kw_only=True)
class ExternalSpec:
    """Where the service is and how to watch it."""

    name: str
    url: str
    liveness: HealthCheck
    logs: Path  # the run's log folder, which gets the events


class ExternalService:
    """An external service while a run uses it."""

    def __init__(self, spec: ExternalSpec, events: EventLog) -> None:
        """Probe it once, then start watching it."""
        self.spec = spec
        self._events = events
        self._is_silent = False
        events.add("start", spec.name, f"runs at {spec.url}; this run neither starts nor stops it")
        if ask(spec.liveness) is None:
            events.add("ready", spec.name, "answers")
        # Its CPU time is unknown, so it never counts as busy.
        self.monitor = HealthMonitor(spec.name, spec.liveness, lambda: CpuTime(0.0, 0.0))

    @property
    def state(self) -> str:
        """Its health, with `silent` instead of `hung`."""
        state = self.monitor.health.state
        return SILENT if state == "hung" else state

    def check(self) -> None:
        """Add an event if it stopped answering or answers again."""
        state, spec = self.state, self.spec
        if state == SILENT and not self._is_silent:
            self._is_silent = True
            health = self.monitor.health
            silent_s = time.monotonic() - health.silent_since
            text = f"{spec.url} has not answered for {silent_s:.0f} s ({health.problem})"
            self._events.add(SILENT, spec.name, f"{text}: until it does, calls to it fail and are counted")
        elif state == "healthy" and self._is_silent:
            self._is_silent = False
            self._events.add("ready", spec.name, f"{spec.url} answers again")

    def close(self) -> None:
        """Stop watching it."""
        self.monitor.close()
        self._events.add("stopped", self.spec.name, "no longer watched")
