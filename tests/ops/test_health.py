"""Health by probes that do work: cheap while work flows, patient with the busy, sure of the hung."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from conftest import StartPeer, unused_port

from drzero.ops.services import health
from drzero.ops.services.health import CpuTime, HealthCheck, HealthMonitor, ask, read_counters

StartPage = Callable[[int, bytes], str]


class Service:
    """A scripted service: what it answers, what it has counted, what CPU it has used and waited for."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.counters: dict[str, float] = {"work": 1.0}
        self.cpu_s = self.waited_s = 0.0
        self.probes = 0
        self.now = 0.0


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service()

    def asked(check: HealthCheck) -> str | None:
        made.probes += 1
        return made.problem

    monkeypatch.setattr(health, "ask", asked)
    monkeypatch.setattr(health, "read_counters", lambda url: dict(made.counters))
    monkeypatch.setattr(health.time, "monotonic", lambda: made.now)
    yield made


@pytest.fixture
def start_page() -> Iterator[StartPage]:
    """Serve one page, with a status."""
    servers = []

    def start(status: int, page: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(page)

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def monitor(service: Service, **settings: Any) -> HealthMonitor:
    check = HealthCheck(url="x", metrics_url="y", work=("work",), every_s=1e6, **settings)
    made = HealthMonitor("service", check, lambda: CpuTime(service.cpu_s, service.waited_s))
    made.close()  # its thread: the test polls itself
    return made


def looked(monitor: HealthMonitor, service: Service, seconds: float) -> str:
    service.now += seconds
    monitor.poll()
    return monitor.health.state


def test_finished_work_is_proof_enough_and_no_probe_is_sent(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    before = service.probes
    service.counters = {"work": 9.0}
    assert looked(watched, service, 5) == "healthy" and service.probes == before
    assert watched.health.worked == 7  # of the 8, one may have been the probe's


def test_what_only_our_own_probe_has_counted_is_no_work(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    service.counters = {"work": 2.0}
    before = service.probes
    looked(watched, service, 5)
    assert service.probes == before + 1 and watched.health.worked == 0


def test_a_service_that_idles_and_fails_its_probes_is_hung_after_two(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    service.problem = "no answer within 4 s"
    assert looked(watched, service, 6) == "failing"
    assert looked(watched, service, 6) == "hung"
    service.problem = None
    assert looked(watched, service, 1) == "healthy"


def test_one_that_says_its_index_is_away_is_never_hung_for_that(service: Service) -> None:
    watched = monitor(service, away=424)
    service.problem = health.Away("status 424")
    assert [looked(watched, service, 60) for _ in range(3)] == ["away"] * 3
    service.problem = "no answer within 4 s"
    assert looked(watched, service, 6) == "failing"
    service.problem = None
    assert looked(watched, service, 1) == "healthy"


def test_a_single_failed_probe_is_no_hang_however_long_it_took(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    service.problem = "status 503"
    assert looked(watched, service, 60) == "failing"


@pytest.mark.parametrize(
    ("counters", "time", "seconds"),
    [({"work": 1.0}, "cpu_s", 5.0), ({}, "waited_s", 4.0)],
    ids=["answers its counters and burns CPU", "answers nothing and gets no CPU among others"],
)
def test_a_service_is_busy_for_a_while_if_it(
    service: Service, counters: dict[str, float], time: str, seconds: float
) -> None:
    watched = monitor(service, busy_s=100.0)
    looked(watched, service, 5)
    service.problem, service.counters = "no answer within 4 s", counters
    states = []
    for _ in range(24):
        setattr(service, time, getattr(service, time) + seconds)
        states.append(looked(watched, service, 5))
    assert states[0] == "failing" and set(states[1:19]) == {"busy"} and states[-1] == "hung"


def test_short_waits_for_a_cpu_do_not_hide_a_hang(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    service.problem = "no answer within 4 s"
    for _ in range(2):
        service.waited_s += 0.6
        state = looked(watched, service, 6)
    assert state == "hung"


def test_one_that_burns_cpu_and_answers_nothing_is_hung(service: Service) -> None:
    watched = monitor(service)
    looked(watched, service, 5)
    service.problem, service.counters = "no answer within 4 s", {}
    for _ in range(2):
        service.cpu_s += 6.0
        state = looked(watched, service, 6)
    assert state == "hung"


def test_a_hang_is_known_within_20_seconds_of_its_beginning() -> None:
    check = HealthCheck(url="x")
    # At worst it begins right after a poll: the wait, two polls (counters, probe), the pause between them.
    assert check.every_s + 2 * (check.timeout_s + 1.0) + health._AGAIN_S <= 20
    assert check.every_s + check.timeout_s + 1.0 + health._AGAIN_S > check.silent_s


def test_the_status_for_away_is_distinguished(start_peer: StartPeer) -> None:
    url = f"{start_peer('/health', lambda _: 424).url}/health"
    assert isinstance(ask(HealthCheck(url=url, body={}, away=424)), health.Away)
    assert not isinstance(ask(HealthCheck(url=url, body={})), health.Away)


def test_a_probe_says_what_was_wrong(start_peer: StartPeer) -> None:
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
    "said", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"]
)
def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as client, suppress(OSError):
                client.sendall(said)
                while True:
                    client.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert ask(HealthCheck(url=url, timeout_s=0.5)) == "no answer within 0.5 s"


def test_a_server_that_accepts_and_never_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert ask(HealthCheck(url=url, timeout_s=0.5)) == "no answer within 0.5 s"


def test_counters_are_summed_over_their_labels(start_page: StartPage) -> None:
    page = b'# HELP a\na{b="1"} 2.0\na{b="2"} 3\nc 1e3\nnonsense\n'
    assert read_counters(start_page(200, page)) == {"a": 5.0, "c": 1000.0}


def test_a_page_that_is_not_there_has_no_counters(start_page: StartPage) -> None:
    assert read_counters(start_page(404, b"a 1\n")) == {}
