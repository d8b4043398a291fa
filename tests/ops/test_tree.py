"""A process's time without a CPU, as the kernel counts it."""

import os
import subprocess
import sys

import pytest
from search_parts import wait_for

from drzero.ops.process.tree import descendants


@pytest.fixture
def crowd():
    cpu = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    codes = (busy, busy, "import time; time.sleep(300)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def waited(pid: int) -> float:
    return descendants([pid])[pid][0].waited_s()


def test_who_wants_a_cpu_that_others_use_waits_and_who_sleeps_does_not(crowd):
    one, other, asleep = crowd
    wait_for(lambda: waited(one) > 1 and waited(other) > 1, 30)
    before = waited(one), waited(asleep)
    wait_for(lambda: waited(one) > before[0] + 1, 30)
    assert waited(asleep) - before[1] < 0.5


def test_of_a_process_that_has_ended_nothing_is_known():
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = descendants([ended.pid])[ended.pid][0]
    ended.kill()
    ended.wait()
    assert process.waited_s() == 0
