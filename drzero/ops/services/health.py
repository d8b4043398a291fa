"""Whether a running service does useful work: its counters grow, or a probe that does real work succeeds.

If probes fail, it is *busy* while it uses or waits for CPUs, *away* if its dependency is, else *hung*.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from drzero.ops.console import say

_AGAIN_S = 1.0  # pause after a failed probe
_WORKING = 0.05  # CPU seconds per second. Low, because a crowded machine gives it few
_STARVED = 0.5
"""Seconds per second of waiting for a CPU. SGLang idle beside a training step: 0.03, beside a start: 2."""


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """How to check whether a service works."""

    url: str  # answers 200 after doing real work
    body: Mapping[str, Any] | None = None  # JSON for a POST to a service without a health endpoint
    wrong: Callable[[Any], str | None] | None = None  # returns the fault in the JSON of a 200 answer
    away: int | None = None  # HTTP status of a service whose dependency does not answer
    metrics_url: str | None = None  # a Prometheus page
    work: tuple[str, ...] = ()  # counters of finished work on that page. Each of our probes may add one
    every_s: float = 5.0
    timeout_s: float = 4.0
    silent_s: float = 8.0
    """Hung after this and two failed probes, so within every_s + 2 × (timeout_s + 1) + 1 = 16 s."""
    busy_s: float = 120.0  # the limit for a busy service


class Away(str):
    """A problem of a service's dependency."""


def ask(check: HealthCheck) -> str | None:
    """Probe once and return the problem, or None if the service is healthy."""
    body = None if check.body is None else json.dumps(check.body).encode()
    try:
        status, answer = _fetch(check.url, body, check.timeout_s)
        if status != HTTPStatus.OK:
            return (Away if status == check.away else str)(f"status {status}")
        return check.wrong(json.loads(answer)) if check.wrong else None
    except TimeoutError:
        return f"no answer within {check.timeout_s:g} s"
    except (OSError, ValueError, http.client.HTTPException) as error:  # refused, reset, neither HTTP nor JSON
        return str(error)


def _fetch(url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of a GET or POST. The whole answer must arrive within `timeout_s`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    late = threading.Event()
    with closing(kind(parts.netloc.rpartition("@")[2], timeout=timeout_s)) as connection:
        connection.connect()
        connected = connection.sock  # the answer may take ownership of it

        def cut() -> None:
            late.set()
            with suppress(OSError):  # closed meanwhile
                connected.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, cut)
        timer.daemon = True
        timer.start()
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            method = "GET" if body is None else "POST"
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
    if late.is_set():
        raise TimeoutError
    return answer.status, content


def read_counters(url: str) -> dict[str, float]:
    """Return the samples of a Prometheus page by name, summed over labels. Empty without an answer."""
    try:
        status, page = _fetch(url, None, timeout_s=1.0)
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    counters: dict[str, float] = {}
    for line in page.decode(errors="replace").split("\n") if status == HTTPStatus.OK else ():
        with suppress(ValueError):  # parse line by line, so that a malformed line costs only itself
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    counters[sample.name] = counters.get(sample.name, 0.0) + sample.value
    return counters


@dataclass
class Health:
    """The current health of a service."""

    state: str = "healthy"  # healthy, failing (too early to call it hung), busy, away, or hung
    problem: str | None = None  # what the last probe reported
    silent_since: float = field(default_factory=time.monotonic)  # when it last answered or worked
    counters: dict[str, float] = field(default_factory=dict)
    worked: float = 0.0  # growth of its work counters without our own probes


class CpuTime(NamedTuple):
    """CPU seconds that a service's processes have used and waited for."""

    used_s: float
    waited_s: float


class HealthMonitor(threading.Thread):
    """Polls one service in a thread until you close it."""

    def __init__(self, name: str, check: HealthCheck, cpu_time: Callable[[], CpuTime]) -> None:
        """Start. `cpu_time` is called after a failed probe."""
        # A daemon, so that an exiting interpreter does not wait for a hanging probe.
        super().__init__(name=f"health-{name}", daemon=True)
        self.health = Health()
        self._service = name
        self._check = check
        self._cpu_time = cpu_time
        self._cpu_at_silence, self._silence_seen = CpuTime(0.0, 0.0), 0.0
        self._answers = False
        self._failed = self._probes = 0
        self._end = threading.Event()
        self.start()

    def close(self) -> None:
        """Stop polling."""
        self._end.set()

    def run(self) -> None:
        """Poll until closed."""
        while not self._end.wait(_AGAIN_S if self._failed else self._check.every_s):
            try:
                self.poll()
            except Exception as error:  # our own bug must not end the checks or blame the service
                say(self._service, f"cannot check its health: {error!r}")

    def poll(self) -> None:
        """Check once and update the state."""
        health, check = self.health, self._check
        worked = self._has_worked()
        problem = None
        if not worked:
            self._probes += 1
            problem = ask(check)
        if problem is None:
            self._failed, health.problem = 0, None
            health.silent_since, health.state = time.monotonic(), "healthy"
            return
        if not self._failed:
            self._cpu_at_silence, self._silence_seen = self._cpu_time(), time.monotonic()
        self._failed += 1
        health.problem = problem
        if isinstance(problem, Away):
            if health.state != "away":
                say(self._service, f"works, but its dependency does not answer ({problem}); not restarted")
            # A later hang starts a new silence.
            health.silent_since, health.state = time.monotonic(), "away"
            return
        silent = time.monotonic() - health.silent_since
        if self._failed < 2 or silent < check.silent_s:
            health.state = "failing"
        else:
            health.state = "busy" if silent < check.busy_s and self._is_busy() else "hung"

    def _is_busy(self) -> bool:
        """Whether it has worked since its probes began to fail, or would have with a free CPU."""
        seconds = max(time.monotonic() - self._silence_seen, 1e-9)
        now, then = self._cpu_time(), self._cpu_at_silence
        serves = self._answers or self._check.metrics_url is None
        is_working = serves and (now.used_s - then.used_s) / seconds > _WORKING
        return is_working or (now.waited_s - then.waited_s) / seconds > _STARVED

    def _has_worked(self) -> bool:
        check, before = self._check, self.health.counters
        counters = read_counters(check.metrics_url) if check.metrics_url else {}
        self._answers = bool(counters)
        if not counters:
            return False
        self.health.counters = counters
        own, self._probes = self._probes, 0
        if not before:
            return False
        grown = sum(max(counters.get(name, 0.0) - before.get(name, 0.0) - own, 0.0) for name in check.work)
        self.health.worked += grown
        return grown > 0
