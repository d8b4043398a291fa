"""Processes of a killed run are waited for, then killed. Others are left alone."""

import os
import subprocess
import sys

import psutil

from drzero.ops.process import child

MARK = "DRZERO_TEST_MARK"


def started(value: str, seconds: float) -> "subprocess.Popen[bytes]":
    script = f"import time; time.sleep({seconds})"
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, MARK: value})


def test_a_leftover_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(child, "_LEFTOVERS_END_S", 0.5)
    process = started("mine", 600)
    child.end_leftovers("test", MARK, "mine")
    assert not psutil.pid_exists(process.pid)


def test_a_leftover_that_ends_by_itself_is_given_the_time():
    process = started("slow", 1.0)
    child.end_leftovers("test", MARK, "slow")
    assert process.wait(10) == 0


def test_processes_of_another_run_are_left_alone_and_nothing_is_said(capsys):
    process = started("theirs", 600)
    child.end_leftovers("test", MARK, "mine")
    assert process.poll() is None and capsys.readouterr().out == ""
    process.kill()
    process.wait()
