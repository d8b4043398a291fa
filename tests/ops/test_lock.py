"""A lock that is held by a living process or by nobody."""

import os
import subprocess
import sys

import pytest

from drzero.ops.process.lock import AlreadyRunning, HeldLock, lock_is_held

HOLD = """
import sys
from pathlib import Path
from drzero.ops.process.lock import HeldLock
with HeldLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_with_the_pid_of_the_holder(tmp_path, holder):
    with pytest.raises(AlreadyRunning, match=f"process {holder.pid}"), HeldLock(tmp_path / "lock"):
        pass
    holder.kill()
    holder.wait()


def test_a_killed_holder_leaves_the_lock_free(tmp_path, holder):
    holder.kill()
    holder.wait()
    with HeldLock(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_it_can_be_asked_whether_a_lock_is_held(tmp_path):
    path = tmp_path / "lock"
    assert not lock_is_held(path)
    with HeldLock(path):
        assert lock_is_held(path)
    assert not lock_is_held(path)
