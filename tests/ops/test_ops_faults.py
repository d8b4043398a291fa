"""Faults in real processes are named: the short form of tests/chaos_ops.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from faults.arrangement import LIMITS, Outcome, SilentServer, run_with_fault

QUICK = replace(LIMITS, cold_start_s=6, floor_s=6)

more = pytest.mark.slow("waits for a stall; test_diagnosis.py names all of them from recorded stacks")


def outcome(folder: Path, script: str, *arguments: str) -> Outcome:
    return run_with_fault(folder, script, arguments, limits=QUICK)


@pytest.mark.parametrize(
    ("script", "fault", "verdict", "culprit"),
    [
        pytest.param(*("driver.py", "block-loop", "event loop blocked", "rollout worker"), marks=more),
        pytest.param(*("driver.py", "kill-worker", "rollout starvation", "rollout workers"), marks=more),
        pytest.param(*("ranks.py", "mismatch", "mismatched collectives", "rank 1"), marks=more),
        pytest.param(*("ranks.py", "silence", "same-collective time-out", "all ranks"), marks=more),
        pytest.param(
            *("ranks.py", "shapes", "shape mismatch between pipeline stages", "rank 0, rank 1"), marks=more
        ),
        pytest.param(*("driver.py", "no-steps", "ended without a step", "trainer"), marks=more),
        ("driver.py", "memory", "out of memory", "trainer"),
    ],
)
def test_a_fault_is_named_with_its_culprit_and_nothing_is_left(tmp_path, script, fault, verdict, culprit):
    came = outcome(tmp_path, script, "--fault", fault)
    assert came.verdict == verdict and culprit in came.culprit, came
    assert came.left == []
    if came.after_limit is not None:
        assert (tmp_path / "logs" / "stall_001.md").read_text().startswith(f"# {verdict}: {culprit}")


def test_a_tool_that_accepts_and_never_answers_is_named(tmp_path):
    with SilentServer() as url:
        came = outcome(tmp_path, "driver.py", "--fault", "no-deadline", "--silent", url)
    assert (came.verdict, came.culprit, came.left) == ("tool call without deadline", "retrieval", [])


@pytest.mark.slow("a real run that waits; test_watchdog.py judges starts by the clock")
def test_a_start_that_is_slow_is_no_stall(tmp_path):
    came = outcome(tmp_path, "driver.py", "--fault", "slow-start", "--slow-s", "9")
    assert (came.verdict, came.ended, came.left) == ("none", "exit 0", [])
