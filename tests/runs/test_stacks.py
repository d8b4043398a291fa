"""`drzero stacks`: where the processes of a live run stand, read from outside, and its page."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults.arrangement import HERE
from search_parts import wait_for

from drzero.cli import main
from drzero.ops.process.child import Child, Command
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.watchdog import stacks

TRAINER = """\
import os, sys, time
from setproctitle import setproctitle
def wait_for_batch():
    time.sleep(600)
def play(number):
    setproctitle(f"ray::AgentLoopWorker {number}")
    time.sleep(600)
for number in range(2):
    if not os.fork():
        play(number)
open(sys.argv[1], "w").close()
wait_for_batch()
"""


@pytest.fixture
def run(tmp_path):
    """The folder of a run."""
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def live(run):
    """The run in its second step, supervised by this process: a trainer with two workers, all asleep."""
    up, script, log = run / "up", run / "trainer.py", run / "logs" / "trainer.log"
    script.write_text(TRAINER)
    command = Command(name="trainer", command=(sys.executable, str(script), str(up)), log_path=log)
    with HeldLock(run / "lock"):
        EventLog(run / "logs" / EVENTS_FILE).add("start", "trainer", "starting", log=str(log), offset=0)
        beat = {"time": time.time(), "step": 2, "phase": "rollout"}
        (run / "heartbeats.jsonl").write_text(json.dumps(beat) + "\n")
        trainer = Child(command, 1)
        try:
            wait_for(up.exists, 60)
            yield run
            assert trainer.poll() is None, "a look has ended the run"
        finally:
            trainer.stop()


def worker_of(run: Path) -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if "AgentLoopWorker" in " ".join(child.cmdline()))


def readable() -> None:
    if problem := stacks.why_unreadable():
        pytest.skip(f"this machine does not allow it: {problem}")


def test_all_processes_are_grouped_by_where_they_stand_and_the_page_has_their_stacks(live, capsys):
    readable()
    assert main(["stacks", str(live)]) == 0
    out = capsys.readouterr().out
    assert f"{live}: rollout of step 2 for " in out
    assert "2 × `play (trainer.py:7)`: rollout worker " in out
    assert "1 × `wait_for_batch (trainer.py:4)`: trainer " in out
    assert f"stage {os.getpid()}" in out, "the stage's own process"
    assert "no stall has been reported, and nothing in its stacks is odd" in out
    page = (live / "logs" / "stacks_001.md").read_text()
    assert page.startswith("# no stall: rollout of step 2\n")
    assert "It was asked for by `drzero stacks`." in page and "without progress" not in page
    assert page.count("play (trainer.py:7)") == 3, "in its group, and in full for each process"


def test_a_reported_stall_is_diagnosed_from_the_present_stacks(live, capsys):
    readable()
    stall = {"phase": "rollout", "step": 2, "silent_s": 61.0, "limit_s": 60.0, "report": "x"}
    EventLog(live / "logs" / EVENTS_FILE).add("stall", "rollout workers", "nothing moves", **stall)
    worker = worker_of(live)
    worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, 10)
    assert main(["stacks", str(live)]) == 0
    out = capsys.readouterr().out
    assert "(pid " in out and ") is stopped by a signal" in out and "culprit       rollout worker" in out
    page = (live / "logs" / "stacks_001.md").read_text()
    assert page.startswith("# stopped process: rollout worker\n")
    assert " s without progress (limit 60 s)" in page, "those since the report are added"


def test_a_run_that_is_not_running_is_refused(run, capsys):
    assert main(["stacks", str(run)]) == 2
    assert f"{run} is not running: `drzero diagnose {run}` has how it ended" in capsys.readouterr().err
    assert list((run / "logs").iterdir()) == []


def test_a_run_of_another_machine_is_refused_with_advice(live, capsys):
    """A lock on a shared disk names a foreign process, whose pid means another one here, or none."""
    for pid in (str(2**22 + 1), str(os.getppid())):
        (live / "lock").write_text(pid)
        assert main(["stacks", str(live)]) == 2
        assert f"by process {pid} of another machine or container" in capsys.readouterr().err


def test_a_machine_that_forbids_py_spy_is_refused_with_advice(live, tmp_path, monkeypatch, capsys):
    py_spy = tmp_path / "py-spy"
    py_spy.write_text("#!/bin/sh\necho 'Error: Operation not permitted (os error 1)' >&2; exit 1\n")
    py_spy.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(py_spy))
    assert main(["stacks", str(live)]) == 2
    err = capsys.readouterr().err
    assert "py-spy can read none of the run's processes (py-spy: Error: Operation not permitted" in err
    assert "CAP_SYS_PTRACE" in err and not list((live / "logs").glob("stacks_*"))


@pytest.mark.slow("imports torch in two processes; test_diagnosis.py compares recorded stacks")
def test_ranks_are_compared_from_another_terminal_before_any_limit_has_passed(run):
    log = run / "logs" / "trainer.log"
    words = (sys.executable, str(HERE / "ranks.py"), "--folder", str(run), "--fault", "mismatch")
    with HeldLock(run / "lock"):
        trainer = Child(Command(name="trainer", command=words, log_path=log), 1)
        try:
            wait_for((run / "fault.json").exists, 120)
            command = [sys.executable, "-m", "drzero.cli", "stacks", str(run)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        finally:
            trainer.stop()
    assert done.returncode == 0, done.stderr
    assert "rank 0: all_reduce called by learn_with_branch (ranks.py:" in done.stdout
    assert "rank 1: all_gather called by learn_with_branch (ranks.py:" in done.stdout
    assert "these stacks look like mismatched collectives: rank 1 is not where" in done.stdout
