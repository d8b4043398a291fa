"""Health by probes that do work: cheap while work flows, patient with the busy, sure of the hung."""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from conftest import unused_port
from fastapi.responses import PlainTextResponse

from drzero.ops.services import health
from drzero.ops.services.health import CpuTime, HealthCheck, HealthMonitor, ask, read_counters


class Service:
    """A scripted service with its answers, counters and CPU times."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.counters: dict[str, float] = {"work": 1.0}
        self.cpu_s = self.waited_s = 0.0
        self.probes = 0
        self.now = 0.0


@pytest.fixture
def service(monkeypatch):
    made = Service()

    def asked(check: HealthCheck) -> str | None:
        made.probes += 1
        return made.problem

    monkeypatch.setattr(health, "ask", asked)
    monkeypatch.setattr(health, "read_counters", lambda url: dict(made.counters))
    monkeypatch.setattr(health.time, "monotonic", lambda: made.now)
    yield made


def monitor(service: Service, **settings: Any) -> HealthMonitor:
    check = HealthCheck(url="x", metrics_url="y", work=("work",), every_s=1e6, **settings)
    made = HealthMonitor("service", check, lambda: CpuTime(service.cpu_s, service.waited_s))
    made.close()  # its thread: the test polls itself
    return made


def looked(monitor: HealthMonitor, service: Service, seconds: float) -> str:
    service.now += seconds
    monitor.poll()
    return monitor.health.state


def test_finished_work_is_proof_enough_but_our_own_probes_are_no_work(service):
    watched = monitor(service)
    looked(watched, service, 5)
    before = service.probes
    service.counters = {"work": 2.0}  # the probe's own
    looked(watched, service, 5)
    assert service.probes == before + 1 and watched.health.worked == 0
    service.counters = {"work": 9.0}
    assert looked(watched, service, 5) == "healthy" and service.probes == before + 1
    assert watched.health.worked == 6  # of the 7, one may have been the probe's


NO_ANSWER, AWAY = "no answer within 4 s", health.Away("status 424")


@pytest.mark.parametrize(
    "looks",
    [
        [(NO_ANSWER, 6, "failing"), (NO_ANSWER, 6, "hung"), (None, 1, "healthy")],
        [(AWAY, 60, "away"), (AWAY, 60, "away"), (NO_ANSWER, 6, "failing"), (None, 1, "healthy")],
        [("status 503", 60, "failing")],
    ],
    ids=["two failed probes", "its dependency is away", "one slow probe"],
)
def test_failed_probes_lead_to_a_state(service, looks):
    watched = monitor(service, away=424)
    looked(watched, service, 5)
    for problem, seconds, state in looks:
        service.problem = problem
        assert looked(watched, service, seconds) == state


@pytest.mark.parametrize(
    ("counters", "time", "seconds"),
    [({"work": 1.0}, "cpu_s", 5.0), ({}, "waited_s", 4.0)],
    ids=["answers its counters and burns CPU", "answers nothing and gets no CPU among others"],
)
def test_a_service_is_busy_for_a_while_if_it(service, counters, time, seconds):
    watched = monitor(service, busy_s=100.0)
    looked(watched, service, 5)
    service.problem, service.counters = "no answer within 4 s", counters
    states = []
    for _ in range(24):
        setattr(service, time, getattr(service, time) + seconds)
        states.append(looked(watched, service, 5))
    assert states[0] == "failing" and set(states[1:19]) == {"busy"} and states[-1] == "hung"


@pytest.mark.parametrize(
    ("counters", "time", "seconds"),
    [({"work": 1.0}, "waited_s", 0.6), ({}, "cpu_s", 6.0)],
    ids=["short waits for a CPU", "burns CPU and answers nothing"],
)
def test_a_service_is_hung_in_spite_of(service, counters, time, seconds):
    watched = monitor(service)
    looked(watched, service, 5)
    service.problem, service.counters = NO_ANSWER, counters
    for _ in range(2):
        setattr(service, time, getattr(service, time) + seconds)
        state = looked(watched, service, 6)
    assert state == "hung"


def test_a_hang_is_known_within_20_seconds_of_its_beginning():
    check = HealthCheck(url="x")
    # At worst it begins right after a poll: the wait, two polls (counters, probe), the pause between them.
    assert check.every_s + 2 * (check.timeout_s + 1.0) + health._AGAIN_S <= 20
    assert check.every_s + check.timeout_s + 1.0 + health._AGAIN_S > check.silent_s


def test_the_status_for_away_is_distinguished(start_peer):
    url = f"{start_peer('/health', lambda _: 424).url}/health"
    assert isinstance(ask(HealthCheck(url=url, body={}, away=424)), health.Away)
    assert not isinstance(ask(HealthCheck(url=url, body={})), health.Away)


def test_a_probe_says_what_was_wrong(start_peer):
    peer = start_peer("/retrieve", lambda body: {"result": body["queries"]}, {"/health": {"status": "ok"}})
    assert ask(HealthCheck(url=f"{peer.url}/health")) is None
    assert ask(HealthCheck(url=f"{peer.url}/nowhere")) == "status 404"
    assert "refused" in (ask(HealthCheck(url=f"http://127.0.0.1:{unused_port()}/")) or "")
    canary = HealthCheck(
        url=f"{peer.url}/retrieve",
        body={"queries": ["canary"]},
        wrong=lambda answer: None if answer["result"] == ["canary"] else "garbage",
    )
    assert ask(canary) is None
    assert ask(HealthCheck(url=canary.url, body={"queries": []}, wrong=canary.wrong)) == "garbage"


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["nothing", "head", "body"]
)
def test_a_server_that_sends_nothing_or_a_byte_now_and_then_is_not_waited_for(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as client, suppress(OSError):
                client.sendall(said)
                while True:
                    time.sleep(0.05)
                    client.sendall(b"x" if said else b"")

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert ask(HealthCheck(url=url, timeout_s=0.5)) == "no answer within 0.5 s"


def test_counters_are_summed_over_their_labels_and_a_missing_page_has_none(start_peer):
    page = PlainTextResponse('# HELP a\na{b="1"} 2.0\na{b="2"} 3\nc 1e3\nnonsense\n')
    missing = PlainTextResponse("a 1\n", status_code=404)
    peer = start_peer("/", lambda body: body, {"/metrics": page, "/missing": missing})
    assert read_counters(f"{peer.url}/metrics") == {"a": 5.0, "c": 1000.0}
    assert read_counters(f"{peer.url}/missing") == {}
