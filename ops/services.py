"""Services that a run needs: started together, waited for by health, watched, and stopped in reverse order.

    with ServiceGroup([ServiceSpec(name="retrieval", command=(…), log_path=…, health_url=…)]) as services:
        run_supervised(trainer, services)

A crash is noticed within a fraction of a second, also while another service is still waited for; the error
names the service, how it ended, its first error, its last lines and its log. See `ops.child` for why nothing
is left behind.
"""

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType, TracebackType
from typing import Any

from ops.logs import say
from ops.process import Child, ChildError, Command, describe_exit

_PROBE_EVERY_S = 0.2
_TELL_EVERY_S = 10.0
_PROBE_TIMEOUT_S = 2.0
_ORDERED = (signal.SIGTERM, signal.SIGHUP)
# Services are local: a proxy set for the outside must not be asked about them.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class ServiceSpec(Command):
    """A command that is ready once `health_url` answers 200; it has `startup_budget_s` seconds for that."""

    health_url: str
    startup_budget_s: float = 120.0


class ServiceDied(ChildError):
    """A service ended although it was needed."""


class ServiceNotReady(ChildError):
    """A service runs but was not healthy within its start-up budget."""


class Service(Child):
    """A running service."""

    spec: ServiceSpec

    def __init__(self, spec: ServiceSpec, grace_s: float) -> None:
        """Start it; `wait_healthy` of the group tells when it is ready."""
        self.started = time.monotonic()
        super().__init__(spec, grace_s)

    def probe(self) -> str | None:
        """Ask for health once: None when healthy, else what was wrong."""
        try:
            with _opener.open(self.spec.health_url, timeout=_PROBE_TIMEOUT_S) as answer:
                return None if answer.status == HTTPStatus.OK else f"status {answer.status}"
        except urllib.error.HTTPError as error:
            return f"status {error.code}"
        except (OSError, ValueError) as error:  # refused, reset or timed out; not HTTP at all
            return str(getattr(error, "reason", error))


class ServiceGroup:
    """Context manager: inside it every service has been healthy; after it none of their processes is left.

    SIGTERM and SIGHUP raise `SystemExit` in the main thread meanwhile, so that they too end in the ordered
    shutdown.
    """

    def __init__(self, specs: Iterable[ServiceSpec], grace_s: float = 10.0) -> None:
        """Prepare the group; `grace_s` is the time each service has between SIGTERM and SIGKILL."""
        self._specs = tuple(specs)
        self._grace_s = grace_s
        self.services: list[Service] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "ServiceGroup":
        """Start all services at once, then wait for each; on any failure all are stopped again."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, _exit_on_signal) for signum in _ORDERED}
        try:
            for spec in self._specs:
                say(spec.name, f"starting (at most {spec.startup_budget_s:.0f} s), log: {spec.log_path}")
                self.services.append(Service(spec, self._grace_s))
            for service in self.services:
                self._wait_healthy(service)
        except BaseException:  # also Ctrl-C while waiting
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all services."""
        self.stop()

    def dead(self) -> list[Service]:
        """Return the services that have ended, in the order of their start."""
        return [service for service in self.services if service.poll() is not None]

    def check(self) -> None:
        """Raise `ServiceDied` for the first service that has ended."""
        for service in self.dead():
            code = service.poll()
            assert code is not None
            raise ServiceDied(f"service {service.spec.name!r} died: {describe_exit(code)}", service)

    def stop(self) -> None:
        """End the services' process trees, the last started first, and give the signals back."""
        while self.services:
            service = self.services.pop()
            service.stop()
            say(service.spec.name, "stopped")
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _wait_healthy(self, service: Service) -> None:
        spec = service.spec
        tell_at = service.started + _TELL_EVERY_S
        while True:
            problem = service.probe()
            self.check()  # after the probe: who answered must not be a stranger on the port of a dead service
            waited = time.monotonic() - service.started
            if problem is None:
                say(spec.name, f"ready after {waited:.1f} s")
                return
            if waited > spec.startup_budget_s:
                raise ServiceNotReady(
                    f"service {spec.name!r} was not healthy within {spec.startup_budget_s:g} s: "
                    f"{spec.health_url} answered: {problem}. "
                    "Read its log; if it was only slow, give it a longer start-up budget.",
                    service,
                )
            if time.monotonic() > tell_at:
                tell_at += _TELL_EVERY_S
                say(
                    spec.name,
                    f"not ready yet: {waited:.0f} of at most {spec.startup_budget_s:.0f} s ({problem})",
                )
            time.sleep(_PROBE_EVERY_S)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
