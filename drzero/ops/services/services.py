"""Services that a run needs: started together, watched, restarted, stopped.

A restart keeps the port and waits twice as long each time. Without restarts left a `ChildError` ends the run.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from drzero.ops.console import say
from drzero.ops.process.child import Child, ChildError, Command
from drzero.ops.process.logs import EventLog
from drzero.ops.process.tree import descendants
from drzero.ops.records import EVENTS_FILE
from drzero.ops.resources.cgroup import OomWatch
from drzero.ops.services.external import ExternalService, ExternalSpec
from drzero.ops.services.health import CpuTime, HealthCheck, HealthMonitor, ask

_LOG_AFTER_S = 30.0  # when to first report a service as not ready. Later reports double the time


@dataclass(frozen=True, kw_only=True)
class ServiceSpec(Command):
    """A command that is ready when `health_url` answers 200, within `startup_budget_s` seconds."""

    health_url: str
    startup_budget_s: float = 120.0
    liveness: HealthCheck | None = None  # how to watch it once it is ready; probes `health_url` by default
    restarts: int = 0  # how many restarts a series of crashes or hangs may take


AnySpec = ServiceSpec | ExternalSpec


class ServiceDied(ChildError):
    """A service ended while the run needed it."""


class ServiceHung(ChildError):
    """A service runs but does no work."""


class ServiceNotReady(ChildError):
    """A service was not healthy within its start-up budget."""


class Service(Child):
    """A running service."""

    spec: ServiceSpec

    def __init__(self, spec: ServiceSpec, grace_s: float) -> None:
        self.started = time.monotonic()
        self.ready_at: float | None = None
        self.log_after_s = _LOG_AFTER_S  # seconds from its start to the next report that it is not ready
        self.monitor: HealthMonitor | None = None
        self.seen_pids: set[int] = set()
        super().__init__(spec, grace_s)

    def probe(self) -> str | None:
        """Probe once and return the problem, or None if it is healthy."""
        return ask(HealthCheck(url=self.spec.health_url, timeout_s=2.0))

    def set_ready(self) -> None:
        """Start watching its health."""
        self.cpu_time()
        self.ready_at = time.monotonic()
        check = self.spec.liveness or HealthCheck(url=self.spec.health_url)
        self.monitor = HealthMonitor(self.spec.name, check, self.cpu_time)

    def cpu_time(self) -> CpuTime:
        """Return the CPU seconds that its processes have used and waited for."""
        tree = descendants([self.pid])[self.pid]
        # The kernel's log may name one of them after its death.
        self.seen_pids.update(process.pid for process in tree)
        return CpuTime(sum(p.cpu_s for p in tree), sum(p.waited_s() for p in tree))

    @property
    def state(self) -> str:
        """dead, starting, or its health."""
        if self.poll() is not None:
            return "dead"
        return self.monitor.health.state if self.monitor else "starting"

    def kill(self) -> None:
        """SIGKILL all its processes except the keeper. A hung service would only use up its grace."""
        for process in descendants([self.pid])[self.pid]:
            if process.pid != self.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the probes and end the whole tree."""
        if self.monitor:
            self.monitor.close()
            if self.monitor.health.state == "hung":
                self.kill()
        super().stop()


class ServiceGroup:
    """Owns its services' processes. SIGTERM and SIGHUP exit. Call `check` in the entering thread."""

    def __init__(
        self, specs: Iterable[AnySpec], grace_s: float = 10.0, events: EventLog | None = None
    ) -> None:
        """`grace_s` separates SIGTERM from SIGKILL. By default `events` are written next to the logs."""
        given = tuple(specs)
        self._specs = [spec for spec in given if isinstance(spec, ServiceSpec)]
        self._external_specs = [spec for spec in given if isinstance(spec, ExternalSpec)]
        self._grace_s = grace_s
        logs = [spec.log_path.parent if isinstance(spec, ServiceSpec) else spec.logs for spec in given]
        self.events = events or EventLog(logs[0] / EVENTS_FILE if logs else None)
        self.services: list[Service] = []
        self.external: list[ExternalService] = []
        self._restarts: Counter[str] = Counter()  # by name, in the current series of failures
        self._again_at: dict[str, float] = {}  # when to restart each service that is down, by name
        self.on_hung: Callable[[Service], str | None] = lambda service: None
        """Called before a hung service is killed. May return a reason to report."""
        self._oom = OomWatch()
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Start all services, then wait for each. Any failure stops all of them."""

        def leave(signum: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + signum)

        if threading.current_thread() is threading.main_thread():
            orders = (signal.SIGTERM, signal.SIGHUP)
            self._handlers = {signum: signal.signal(signum, leave) for signum in orders}
        try:
            self.external += [ExternalService(spec, self.events) for spec in self._external_specs]
            for spec in self._specs:
                text = f"starting (at most {spec.startup_budget_s:.0f} s)"
                self.events.add("start", spec.name, text, log=str(spec.log_path))
                self.services.append(Service(spec, self._grace_s))
            while self._again_at or any(service.ready_at is None for service in self.services):
                self.check()
                time.sleep(0.2)
        except BaseException:  # also Ctrl-C while waiting
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check(self) -> None:
        """Restart a failed service, or raise ServiceDied, ServiceHung or ServiceNotReady."""
        for external in self.external:
            external.check()
        for place, service in enumerate(self.services):
            name = service.spec.name
            if name in self._again_at:
                if time.monotonic() >= self._again_at[name]:
                    del self._again_at[name]
                    self.services[place] = Service(service.spec, self._grace_s)
            elif (code := service.poll()) is not None:
                how = self._oom.describe_exit(code, service.seen_pids)
                self._fail(service, ServiceDied, "crash", f"died: {how}")
            elif service.ready_at is None:
                self._poll_start(service)
            elif service.monitor and service.monitor.health.state == "hung":
                health = service.monitor.health
                silent = time.monotonic() - health.silent_since
                text = f"hangs: no sign of work for {silent:.0f} s ({health.problem})"
                reason = self.on_hung(service)
                self._fail(service, ServiceHung, "hung", f"{text}: {reason}" if reason else text)
            elif time.monotonic() - service.ready_at > 600:  # the series of failures is over
                self._restarts[name] = 0

    def stop(self) -> None:
        """End the services in reverse order and restore the signal handlers."""
        while self.services:
            service = self.services.pop()
            service.stop()
            self.events.add("stopped", service.spec.name, "stopped")
        while self.external:
            self.external.pop().close()
        self._oom.close()
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _fail(self, service: Service, error: type[ChildError], kind: str, what: str) -> None:
        """Plan a restart, or raise."""
        spec, tried = service.spec, self._restarts[service.spec.name]
        allowed = tried < spec.restarts and (service.ready_at is not None or tried > 0)
        first_error = {"first_error": service.first_error} if service.first_error else {}
        self.events.add(kind, spec.name, what, **first_error)
        if not allowed:
            after = f" (after {tried} restarts)" if tried else ""
            raise error(f"service {spec.name!r} {what}{after}", service)
        pause = min(2.0**tried, 30.0)
        self._restarts[spec.name] += 1
        text = f"restart {tried + 1} of at most {spec.restarts} in {pause:.0f} s"
        self.events.add("restart", spec.name, text)
        service.stop()  # its remaining processes would hold the port
        self._again_at[spec.name] = time.monotonic() + pause

    def _poll_start(self, service: Service) -> None:
        spec, problem = service.spec, service.probe()
        waited = time.monotonic() - service.started
        if service.poll() is not None:  # a stranger may have answered on a dead service's port
            return
        if problem is None:
            self.events.add("ready", spec.name, f"ready after {waited:.1f} s", seconds=round(waited, 2))
            service.set_ready()
        elif waited > spec.startup_budget_s:
            what = (
                f"was not healthy within {spec.startup_budget_s:g} s: {spec.health_url} answered: {problem}. "
                "Read its log; if it was only slow, increase its start-up budget"
            )
            service.kill()
            self._fail(service, ServiceNotReady, "hung", what)
        elif waited > service.log_after_s:
            service.log_after_s *= 2
            budget = f"{waited:.0f} of at most {spec.startup_budget_s:.0f} s"
            say(spec.name, f"not ready yet: {budget} ({problem})")
