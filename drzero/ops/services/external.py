"""A service that runs elsewhere and serves other runs too: watched by its answers, never started or ended.

    spec = OutsideSpec(name="retrieval", url=url, liveness=HealthCheck(url=f"{url}/health"), logs=folder)
    with ServiceGroup([spec, ServiceSpec(…)]) as services: ...

A run does not end because such a service stops answering: its calls fail within their own deadlines and are
counted, and a run ends by its limit on failures. That it has stopped is the event `silent`, that it answers
again `ready`.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from drzero.ops.process.logs import EventLog
from drzero.ops.services.health import CpuTime, HealthCheck, HealthMonitor, ask

SILENT = "silent"
"""The state of one that does not answer, and the event of it."""


@dataclass(frozen=True, kw_only=True)
class OutsideSpec:
    """Where the service is, and how it is watched."""

    name: str
    url: str
    liveness: HealthCheck
    logs: Path
    """The folder of the run's own logs, for its events."""


class OutsideService:
    """A service that runs elsewhere, while a run uses it."""

    def __init__(self, spec: OutsideSpec, events: EventLog) -> None:
        """Ask it once, and watch it from now on."""
        self.spec = spec
        self._events = events
        self._is_silent = False
        events.add("start", spec.name, f"asked at {spec.url}, and not this run's to start or end")
        if ask(spec.liveness) is None:
            events.add("ready", spec.name, "answers")
        # Its CPU time is not known here, so that it is never taken for busy.
        self.monitor = HealthMonitor(spec.name, spec.liveness, lambda: CpuTime(0.0, 0.0))

    @property
    def state(self) -> str:
        """Its health; silent where a service of the run's own would be hung."""
        state = self.monitor.health.state
        return SILENT if state == "hung" else state

    def check(self) -> None:
        """Add an event if it has stopped answering, or answers again."""
        state, spec = self.state, self.spec
        if state == SILENT and not self._is_silent:
            self._is_silent = True
            health = self.monitor.health
            silent_s = time.monotonic() - health.silent_since
            text = f"{spec.url} has not answered for {silent_s:.0f} s ({health.problem})"
            self._events.add(SILENT, spec.name, f"{text}: calls to it fail, and are counted, until it does")
        elif state == "healthy" and self._is_silent:
            self._is_silent = False
            self._events.add("ready", spec.name, f"{spec.url} answers again")

    def close(self) -> None:
        """Stop watching it."""
        self.monitor.close()
        self._events.add("stopped", self.spec.name, "not watched any more")
