"""Services and the supervised command, as real processes with real signals on loopback."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from search_parts import wait_for

from drzero.ops import supervisor
from drzero.ops.process.child import Child, Command, describe_exit, marked_processes
from drzero.ops.process.ports import free_port
from drzero.ops.records import EVENTS_FILE, OUT_OF_TIME, read_json_lines
from drzero.ops.services.services import ServiceDied, ServiceGroup, ServiceNotReady, ServiceSpec
from drzero.ops.supervisor import ChildFailed, Unfinished, run_supervised

HEALTHY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]))
        self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""

# Its child leaves the session and refuses SIGTERM: what a daemon of Ray does, and worse.
ESCAPED = """
import os, pathlib, signal, subprocess, sys, time
code = "import pathlib, os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
while not pathlib.Path(sys.argv[1]).exists() or not pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.02)
print("escaped", flush=True)
"""


def python(code: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code), *map(str, arguments))


def command(folder: Path, code: str, *arguments: object, name: str = "main") -> Command:
    return Command(name=name, command=python(code, *arguments), log_path=folder / f"{name}.log")


def service(
    folder: Path, name: str, code: str = HEALTHY, status: int = 200, budget_s: float = 30
) -> ServiceSpec:
    port = free_port(None)
    return ServiceSpec(
        name=name,
        command=python(code, port, status),
        log_path=folder / f"{name}.log",
        health_url=f"http://127.0.0.1:{port}/health",
        startup_budget_s=budget_s,
    )


def written_pid(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text(), 30)
    return int(path.read_text())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_services_answer_inside_the_group_and_leave_no_process_after_it(tmp_path, capsys):
    with ServiceGroup([service(tmp_path, "first"), service(tmp_path, "second")]) as group:
        assert [one.probe() for one in group.services] == [None, None]
        assert [one.poll() for one in group.services] == [None, None]
        run_ids = [one.run_id for one in group.services]
        assert all(marked_processes(run_id) for run_id in run_ids)
    assert [marked_processes(run_id) for run_id in run_ids] == [[], []]
    printed = capsys.readouterr().out
    assert printed.index("[second] stopped") < printed.index("[first] stopped")
    # Output goes to the log.
    assert "serving" not in printed and f"log: {tmp_path / 'first.log'}" in printed
    assert (tmp_path / "first.log").read_text() == "serving\n"


def test_a_crash_while_waiting_is_reported_with_exit_first_error_and_log(tmp_path):
    broken = service(tmp_path, "solver", "print('loading'); raise ValueError('no such model')")
    with pytest.raises(ServiceDied) as caught, ServiceGroup([broken]):
        pass
    message = str(caught.value)
    assert message.startswith("service 'solver' died: exit code 1\nfirst error: ValueError: no such model\n")
    assert "  loading" in message and message.endswith(f"log: {tmp_path / 'solver.log'}")


def test_a_crash_is_noticed_while_others_start_and_stops_all_of_them(tmp_path):
    before = psutil.Process().children(recursive=True)
    slow = service(tmp_path, "slow", "import time; time.sleep(300)", budget_s=600)
    broken = service(tmp_path, "broken", "raise SystemExit(3)", budget_s=600)
    specs = [slow, service(tmp_path, "fine"), broken]
    with pytest.raises(ServiceDied, match="'broken' died: exit code 3"), ServiceGroup(specs):
        pass
    assert psutil.Process().children(recursive=True) == before


def test_a_service_that_cannot_start_in_time_or_at_all_is_reported(tmp_path):
    late = replace(service(tmp_path, "solver", status=503, budget_s=2), restarts=3)
    words = r"within 2 s: http://\S+ answered: status 503"
    with pytest.raises(ServiceNotReady, match=words), ServiceGroup([late]):
        pass
    kinds = [event["kind"] for event in read_json_lines(tmp_path / EVENTS_FILE)]
    assert kinds == ["start", "hung", "stopped"]
    absent = replace(late, command=("no-such-program",))
    with pytest.raises(ServiceDied, match="cannot start 'no-such-program'"), ServiceGroup([absent]):
        pass


@pytest.mark.parametrize("keeper_lives", [True, False])
def test_shutdown_ends_grandchildren_that_left_the_session_and_refuse_sigterm(tmp_path, keeper_lives):
    child = Child(command(tmp_path, ESCAPED + "time.sleep(300)", tmp_path / "pid"), grace_s=0.5)
    pid = written_pid(tmp_path / "pid")
    if not keeper_lives:
        os.kill(child.pid, signal.SIGKILL)
    child.stop()
    wait_for(lambda: gone(pid), 0 if keeper_lives else 30)


def test_shutdown_touches_no_process_but_its_own(tmp_path):
    stranger = Child(command(tmp_path, "import time; time.sleep(300)", name="stranger"))
    child = Child(command(tmp_path, "import time; time.sleep(300)"), grace_s=0.5)
    child.stop()
    assert stranger.poll() is None
    stranger.stop()


def test_a_command_may_end_in_order_within_its_grace(tmp_path):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
        print("up", flush=True)
        time.sleep(300)
    """
    child = Child(command(tmp_path, code))
    wait_for(lambda: list(child.tail) == ["up"], 30)
    child.stop()
    assert (child.poll(), list(child.tail)) == (0, ["up", "saved"])


def test_a_supervised_command_that_succeeds_returns_zero_and_leaves_no_daemon(tmp_path):
    with ServiceGroup([]) as services:
        assert run_supervised(command(tmp_path, ESCAPED, tmp_path / "pid"), services, grace_s=0.5) == 0
    assert gone(written_pid(tmp_path / "pid"))


LOW = "1 worker(s) were killed due to the node running low on memory"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('out of data')", "failed: exit code 1\nfirst error: RuntimeError: out of data"),
        ("import os; os.abort()", "'trainer' failed: killed by SIGABRT"),
        ("raise OSError(28, 'No space left on device')", r"disk full .*trainer\): make.*\nfirst error"),
        (f"raise RuntimeError({LOW!r})", r"out of memory \(largest other programs: chrome\) \(culprit: "),
        ("raise RuntimeError('CUDA out of memory')", r"out of memory \(culprit: "),
    ],
    ids=["first error", "signal", "disk", "memory", "a GPU's memory"],
)
def test_a_supervised_command_that_fails_is_reported_with_its_cause(tmp_path, monkeypatch, code, said):
    monkeypatch.setattr(supervisor, "largest_others", lambda own: "chrome")
    with ServiceGroup([]) as services, pytest.raises(ChildFailed, match=said):
        run_supervised(command(tmp_path, code, name="trainer"), services)


def test_a_command_that_the_kernel_killed_is_reported_with_who_has_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "largest_others", lambda own: "chrome")
    killed = "killed by SIGKILL: the kernel killed pid 7 for lack of memory"
    monkeypatch.setattr(supervisor, "describe_exit", lambda code: killed)
    main = command(tmp_path, "import os; os.kill(os.getpid(), 9)", name="trainer")
    with ServiceGroup([]) as services, pytest.raises(ChildFailed) as failed:
        run_supervised(main, services)
    cause = "the machine is out of memory (largest other programs: chrome) (culprit: this machine's memory)"
    assert str(failed.value).startswith(f"'trainer' failed: {killed}\ncause: {cause}: close other")


def test_a_command_that_stopped_before_its_work_was_done_has_not_failed(tmp_path):
    main = command(tmp_path, "import sys; print('Error: a line as of a failure'); sys.exit(75)", name="stage")
    with ServiceGroup([service(tmp_path, "retrieval")]) as services, pytest.raises(Unfinished) as stopped:
        run_supervised(main, services)
    assert str(stopped.value).startswith("'stage' stopped before its work was done; a rerun resumes it")
    kinds = [event["kind"] for event in read_json_lines(tmp_path / EVENTS_FILE)]
    assert OUT_OF_TIME in kinds and "exit" not in kinds


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT])
def test_a_command_of_a_background_job_still_ends_by_a_terminals_signals(tmp_path, signum):
    before = signal.signal(signum, signal.SIG_IGN)  # as a script's shell starts its background jobs
    try:
        child = Child(command(tmp_path, f"import os, time; os.kill(os.getpid(), {signum}); time.sleep(300)"))
    finally:
        signal.signal(signum, before)
    wait_for(lambda: child.poll() is not None, 30)
    assert child.poll() == -signum


def test_a_service_that_dies_stops_the_command_and_is_blamed(tmp_path):
    main = command(tmp_path, ESCAPED + "time.sleep(300)", tmp_path / "pid")
    with ServiceGroup([service(tmp_path, "solver")]) as services:

        def kill_solver_once_main_runs() -> None:
            written_pid(tmp_path / "pid")
            psutil.Process(services.services[0].pid).children()[0].kill()

        killer = threading.Thread(target=kill_solver_once_main_runs)
        killer.start()
        with pytest.raises(ServiceDied, match="'solver' died: killed by SIGKILL"):
            run_supervised(main, services, grace_s=0.5)
        killer.join()
    assert gone(written_pid(tmp_path / "pid"))


def test_a_command_that_fails_because_its_service_died_does_not_take_the_blame(tmp_path):
    with ServiceGroup([service(tmp_path, "solver")]) as services:
        [server] = psutil.Process(services.services[0].pid).children()
        code = f"import os, sys; os.kill({server.pid}, 9); sys.exit('ConnectionError: solver')"
        main = command(tmp_path, code)
        with pytest.raises(ServiceDied, match="'solver'"):
            run_supervised(main, services)


@pytest.mark.parametrize(
    ("signum", "code", "in_order"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 1, True), (signal.SIGKILL, -9, False)],
)
def test_a_signal_to_the_supervisor_ends_in_the_ordered_shutdown_or_leaves_no_orphan(
    tmp_path, signum, code, in_order
):
    spec = service(tmp_path, "retrieval")
    supervisor = """
        import sys, time
        from pathlib import Path
        from drzero.ops.process.child import Command
        from drzero.ops.services.services import ServiceGroup, ServiceSpec
        from drzero.ops.supervisor import run_supervised
        folder, url, split = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        server, main = tuple(sys.argv[4:4 + split]), tuple(sys.argv[4 + split:])
        spec = ServiceSpec(name="retrieval", command=server, log_path=folder / "r", health_url=url)
        trainer = Command(name="main", command=main, log_path=folder / "m")
        try:
            with ServiceGroup([spec]) as services:
                run_supervised(trainer, services, grace_s=0.5)
        except KeyboardInterrupt:
            sys.exit(1)
    """
    own = f"pathlib.Path({str(tmp_path / 'own')!r}).write_text(str(os.getpid()))\n"
    main = python(ESCAPED + own + "time.sleep(300)", tmp_path / "pid")
    process = subprocess.Popen(
        python(supervisor, tmp_path, spec.health_url, len(spec.command), *spec.command, *main),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [written_pid(tmp_path / name) for name in ("own", "pid")]
    process.send_signal(signum)
    printed = process.communicate()[0]
    assert (process.returncode, "[retrieval] stopped" in printed) == (code, in_order)
    wait_for(lambda: all(map(gone, pids)), 0 if in_order else 30)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (-15, "killed by SIGTERM"),
        (-9, "killed by SIGKILL, often for lack of memory"),
        (139, "exit code 139 (a child was killed by SIGSEGV)"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_is_described_in_words(code, words):
    assert describe_exit(code) == words
