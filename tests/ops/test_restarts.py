"""Services that crash or hang: started again where their policy allows it, else blamed for the run's end."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from search_parts import wait_for
from test_services import HEALTHY, command
from test_services import service as plain_service

from drzero.ops.records import EVENTS_FILE, read_json_lines
from drzero.ops.services.health import HealthCheck
from drzero.ops.services.services import ServiceDied, ServiceGroup, ServiceHung, ServiceSpec
from drzero.ops.supervisor import run_supervised

QUICK = {"every_s": 0.2, "timeout_s": 0.5, "silent_s": 1.0}


def service(folder: Path, restarts: int, code: str = HEALTHY) -> ServiceSpec:
    spec = plain_service(folder / "logs", "retrieval", code)
    liveness = HealthCheck(url=spec.health_url, **QUICK)  # type: ignore[arg-type]
    return replace(spec, liveness=liveness, restarts=restarts)


def server(group: ServiceGroup) -> psutil.Process:
    return psutil.Process(group.services[0].pid).children()[0]


def checked_until(group: ServiceGroup, condition: Callable[[], object]) -> None:
    wait_for(lambda: group.check() or condition(), 30)


def kinds(logs: Path) -> list[str]:
    return [event["kind"] for event in read_json_lines(logs / EVENTS_FILE)]


def test_a_crashed_service_is_started_again_on_its_port_as_often_as_allowed(tmp_path):
    with ServiceGroup([service(tmp_path, restarts=1)]) as group:
        first = group.services[0]
        server(group).kill()
        checked_until(group, lambda: group.services[0] is not first and group.services[0].ready_at)
        assert group.services[0].probe() is None
        assert kinds(tmp_path / "logs") == ["start", "ready", "crash", "restart", "ready"]
        server(group).kill()
        with pytest.raises(ServiceDied, match=r"died: killed by SIGKILL.*\(after 1 restarts\)"):
            checked_until(group, lambda: False)


def test_a_service_that_never_came_up_is_not_started_again(tmp_path):
    broken = service(tmp_path, restarts=3, code="raise SystemExit(3)")
    with pytest.raises(ServiceDied, match="exit code 3"), ServiceGroup([broken]):
        pass
    assert "restart" not in kinds(tmp_path / "logs")


def test_a_service_that_crashes_while_another_is_still_waited_for_is_started_again(tmp_path):
    once = f"""
        import os, threading
        from pathlib import Path
        mark = Path({str(tmp_path / "crashed")!r})
        if not mark.exists():
            mark.touch()
            threading.Timer(1, os._exit, [3]).start()
    """
    crashes = service(tmp_path, restarts=1, code=dedent(once) + dedent(HEALTHY))
    slow = replace(
        service(tmp_path, restarts=0, code="import time; time.sleep(4)\n" + dedent(HEALTHY)), name="solver"
    )
    with ServiceGroup([crashes, slow]) as group:
        checked_until(group, lambda: {one.state for one in group.services} == {"healthy"})
    events = read_json_lines(tmp_path / "logs" / EVENTS_FILE)
    assert [event["kind"] for event in events if event["component"] == "retrieval"].count("restart") == 1


def test_a_stopped_service_is_hung_and_ends_the_run_where_no_restart_is_allowed(tmp_path):
    with ServiceGroup([service(tmp_path, restarts=0)]) as group:
        group.on_hung = lambda hung: f"{hung.spec.name} is stopped by a signal"
        server(group).send_signal(signal.SIGSTOP)
        words = r"'retrieval' hangs: no sign of work for \d+ s \(no answer within 0.5 s\): .*by a signal"
        with pytest.raises(ServiceHung, match=words):
            checked_until(group, lambda: False)


def test_a_stopped_service_is_ended_and_started_again_where_its_policy_allows_it(tmp_path):
    with ServiceGroup([service(tmp_path, restarts=1)]) as group:
        first, stopped = group.services[0], server(group)
        stopped.send_signal(signal.SIGSTOP)
        checked_until(group, lambda: group.services[0] is not first and group.services[0].ready_at)
        assert not stopped.is_running()
    assert kinds(tmp_path / "logs") == ["start", "ready", "hung", "restart", "ready", "stopped"]


def test_the_run_goes_on_while_a_service_is_started_again(tmp_path):
    spec = service(tmp_path, restarts=1)
    # It kills the service, and is content when it answers again.
    code = """
        import os, sys, time, urllib.request
        url, pid = sys.argv[1], int(sys.argv[2])
        os.kill(pid, 9)
        for _ in range(200):
            time.sleep(0.1)
            try:
                sys.exit(urllib.request.urlopen(url).status != 200)
            except OSError:
                pass
        sys.exit(2)
    """
    with ServiceGroup([spec]) as group:
        main = command(tmp_path / "logs", code, spec.health_url, server(group).pid, name="trainer")
        assert run_supervised(main, group) == 0


def test_a_service_that_is_busy_for_long_is_left_alone(tmp_path):
    spinning = HEALTHY.replace("server.serve_forever()", "server.handle_request()\nwhile True: pass")
    spec = service(tmp_path, restarts=0, code=spinning)
    assert spec.liveness
    # Its share of the CPU is measured over these seconds; a pause of the machine must not be most of them.
    spec = replace(spec, liveness=replace(spec.liveness, silent_s=4, busy_s=60))
    with ServiceGroup([spec]) as group:
        monitor = group.services[0].monitor
        checked_until(group, lambda: monitor and monitor.health.state == "busy")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            group.check()
            time.sleep(0.1)
