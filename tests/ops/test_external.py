"""A service that runs elsewhere: watched and named by a run, never started or ended by it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import unused_port
from test_restarts import checked_until, kinds
from test_services import HEALTHY, python

from drzero.ops.records import EVENTS_FILE, read_json_lines
from drzero.ops.services.external import ExternalSpec
from drzero.ops.services.health import HealthCheck
from drzero.ops.services.services import ServiceGroup
from drzero.ops.watchdog.collect import service_facts
from drzero.ops.watchdog.diagnosis import Landmarks, Situation, diagnose
from drzero.ops.watchdog.movement import Stall
from drzero.ops.watchdog.post_mortem import examine


@contextmanager
def healthy_at(port: int) -> Iterator[None]:
    with subprocess.Popen(python(HEALTHY, port, 200), stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline() == b"serving\n"
        yield
        server.kill()


def outside(port: int, logs: Path) -> ExternalSpec:
    """Watched so closely that it is called silent after a second."""
    url = f"http://127.0.0.1:{port}"
    check = HealthCheck(url=f"{url}/health", every_s=0.1, timeout_s=20.0, silent_s=0.2)
    return ExternalSpec(name="retrieval", url=url, liveness=check, logs=logs)


def test_one_that_stops_answering_is_named_and_the_run_goes_on_until_it_answers_again(tmp_path):
    port = unused_port()
    with ServiceGroup([outside(port, tmp_path)]) as group:
        checked_until(group, lambda: "silent" in kinds(tmp_path))
        with healthy_at(port):
            checked_until(group, lambda: kinds(tmp_path)[-1] == "ready")
    events = read_json_lines(tmp_path / EVENTS_FILE)
    assert [event["kind"] for event in events] == ["start", "silent", "ready", "stopped"]
    assert {event["component"] for event in events} == {"retrieval"}
    assert f"http://127.0.0.1:{port} has not answered for" in events[1]["text"]


def test_it_answers_others_after_a_run_has_ended(tmp_path):
    port = unused_port()
    with healthy_at(port):
        with ServiceGroup([outside(port, tmp_path)]) as first:
            first.check()
        with ServiceGroup([outside(port, tmp_path)]) as second:
            second.check()
    assert kinds(tmp_path) == ["start", "ready", "stopped"] * 2


def test_a_stall_is_blamed_on_the_one_that_is_silent(tmp_path):
    with ServiceGroup([outside(unused_port(), tmp_path)]) as group:
        checked_until(group, lambda: group.external[0].state == "silent")
        facts = service_facts(group.external)
    stall = Stall("phase", "rollout", "nothing has moved in rollout", 90, 60)
    found = diagnose(Situation(phase="rollout", step=1, stall=stall, stacks=[], services=facts), Landmarks())
    assert (found.pattern, found.culprit) == ("silent service", "retrieval")
    assert "runs elsewhere and has not answered for" in found.sentence


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (0, "finished")])
def test_a_run_that_fails_without_it_has_failed_for_it_and_one_that_finishes_has_not(tmp_path, code, state):
    logs = tmp_path / "logs"
    with ServiceGroup([outside(unused_port(), logs)]) as group:
        checked_until(group, lambda: "silent" in kinds(logs))
        group.events.add("exit", "trainer", "ended", code=code)
    death = examine(tmp_path)
    assert death.state == state
    assert death.culprit == ("retrieval" if code else None)
