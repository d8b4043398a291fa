"""Whether a running service also works: a thread checks its answers, its counters and its CPU use.

    monitor = HealthMonitor("retrieval", HealthCheck(url=…, metrics_url=…, work=(…,)), service.cpu_time)
    monitor.health.state        # healthy, failing, busy, away or hung

A probe must do real work, or a server that accepts and never answers would pass for healthy. It must also be
cheap, and must not take a busy server for a hung one. So a poll goes, cheapest first:

1. The counters of finished work (`HealthCheck.work`, Prometheus text): if they have grown since the
   last poll, the service is healthy, and no probe is sent.
2. The probe itself: a canary search, a one-token generation; the service's own endpoint or a request.

A service whose probes fail for `silent_s` is *hung*. It is *busy* instead, for at most `busy_s`, while it
serves its counters and uses CPU (a long batch, a prefill), or while it waits for CPUs that others use: where
many start at once on few cores, an idle server gets so little that a probe outlasts its time-out. One that
answers with the status `away` works, but its dependency (a database) does not: it is *away*, which is logged,
and a restart would not help.
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

_AGAIN_S = 1.0
"""Between a failed probe and the next one."""
_WORKING = 0.05
"""CPU seconds a second. Low, since a crowded machine gives it few."""
_STARVED = 0.5
"""Seconds a second that its threads together wait for a CPU. An idle SGLang on two cores waited 0.03 next to
a training step, and 2 while the trainer's processes started."""


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """How to check whether a service works, as data."""

    url: str
    """Answers 200 when the service has just done real work."""
    body: Mapping[str, Any] | None = None
    """Sent as JSON by POST where the service has no such endpoint of its own."""
    wrong: Callable[[Any], str | None] | None = None
    """Returns what is wrong with the JSON of an answer 200, None if nothing; None skips this check."""
    away: int | None = None
    """The HTTP status of a service that works while its dependency does not answer."""
    metrics_url: str | None = None
    """Prometheus text."""
    work: tuple[str, ...] = ()
    """Counters on that page of finished work; each of our probes may add one."""
    every_s: float = 5.0
    timeout_s: float = 4.0
    silent_s: float = 8.0
    """It is hung after this long without a good answer, and two failed probes in a row. So a hang is detected
    at most every_s + 2 × (timeout_s + 1) + 1 = 16 seconds after it began."""
    busy_s: float = 120.0
    """The same for one that is busy."""


class Away(str):
    """A problem of a service's dependency, not of the service."""


def ask(check: HealthCheck) -> str | None:
    """Probe once: None when healthy, else the problem."""
    body = None if check.body is None else json.dumps(check.body).encode()
    try:
        status, answer = _fetch(check.url, body, check.timeout_s)
        if status != HTTPStatus.OK:
            return (Away if status == check.away else str)(f"status {status}")
        return check.wrong(json.loads(answer)) if check.wrong else None
    except TimeoutError:
        return f"no answer within {check.timeout_s:g} s"
    except (OSError, ValueError, http.client.HTTPException) as error:  # refused, reset, not HTTP, not JSON
        return str(error)


def _fetch(url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of an answer, to a POST if there is a body; never through a proxy.

    Raises TimeoutError when the answer is not complete within `timeout_s`: a socket's own time-out restarts
    with every byte, and a server may send one now and then for ever.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    late = threading.Event()
    with closing(kind(parts.netloc.rpartition("@")[2], timeout=timeout_s)) as connection:
        connection.connect()
        connected = connection.sock  # the answer may take it over

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


def read_counters(url: str, timeout_s: float = 1.0) -> dict[str, float]:
    """Every sample of a Prometheus page by name, labels summed up; empty when it does not answer."""
    try:
        status, page = _fetch(url, None, timeout_s)
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    counters: dict[str, float] = {}
    for line in page.decode(errors="replace").splitlines() if status == HTTPStatus.OK else ():
        with suppress(ValueError):  # one line at a time: a malformed one costs only itself
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    counters[sample.name] = counters.get(sample.name, 0.0) + sample.value
    return counters


@dataclass
class Health:
    """The present health of a service."""

    state: str = "healthy"
    """healthy, failing (a probe has failed, too early to call it hung), busy, away, or hung."""
    problem: str | None = None
    """What the last probe got, when it failed."""
    silent_since: float = field(default_factory=time.monotonic)
    """When it last answered or worked."""
    counters: dict[str, float] = field(default_factory=dict)
    """Its Prometheus page as last read."""
    worked: float = 0.0
    """How much its work counters have grown, without our own probes."""


class CpuTime(NamedTuple):
    """Seconds that a service's processes have had of the CPUs so far, or have waited for."""

    used_s: float
    waited_s: float
    """Of every thread that was ready to run while others ran."""


class HealthMonitor(threading.Thread):
    """Polls one service in a thread of its own until it is closed."""

    def __init__(self, name: str, check: HealthCheck, cpu_time: Callable[[], CpuTime]) -> None:
        """Start; `cpu_time` is called when a probe has failed."""
        # Not joined by an exiting interpreter: a probe may hang for its whole time-out.
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
        """Poll until the end."""
        while not self._end.wait(_AGAIN_S if self._failed else self._check.every_s):
            try:
                self.poll()
            except Exception as error:  # it must not end the checks, nor be blamed on the service
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
            # If it hangs later, its silence begins then.
            health.silent_since, health.state = time.monotonic(), "away"
            return
        silent = time.monotonic() - health.silent_since
        if self._failed < 2 or silent < check.silent_s:
            health.state = "failing"
        else:
            health.state = "busy" if silent < check.busy_s and self._is_busy() else "hung"

    def _is_busy(self) -> bool:
        """Whether it has worked since its probes fail, or would have if it had got a CPU."""
        seconds = max(time.monotonic() - self._silence_seen, 1e-9)
        now, then = self._cpu_time(), self._cpu_at_silence
        serves = self._answers or self._check.metrics_url is None
        is_working = serves and (now.used_s - then.used_s) / seconds > _WORKING
        return is_working or (now.waited_s - then.waited_s) / seconds > _STARVED

    def _has_worked(self) -> bool:
        """Whether finished work was counted since the last poll."""
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
