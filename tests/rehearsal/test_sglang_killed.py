"""A scheduler of the rollout engine is killed or stopped in a step: the run ends, names it, and resumes."""

import os
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest
from chaos import beat
from search_parts import wait_for
from solver_rows import write_questions
from stage_run import RUN_LIMIT_S, assert_nothing_left, run_stage

from verl_ext.checkpoints import saved_step

pytestmark = [
    pytest.mark.slow("starts SGLang three times; `test_diagnosis.py`, `test_ops_faults.py`: other parts"),
    pytest.mark.timeout(3 * RUN_LIMIT_S),
    pytest.mark.matrix,
]


@pytest.fixture(scope="module")
def start(sglang_python, prepared, speaking_model, tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    write_questions(checkpoints, 8, 4)
    folder = checkpoints / "solver"
    arguments = [*prepared.overrides(checkpoints, speaking_model)[:-1], "rollout=sglang", "run.name=solver"]
    arguments += ["steps_per_iteration=2", "trainer.save_freq=1", "data.train_batch_size=4"]
    arguments += ["actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"]

    def started(signum=None, *more):
        since = time.time()

        def strike(watch):
            wait_for(lambda: beat(2, "rollout")(folder, since), RUN_LIMIT_S)
            for pid, _ in list(watch.processes):
                with suppress(psutil.NoSuchProcess):
                    if " ".join(psutil.Process(pid).cmdline()).startswith("sglang::scheduler"):
                        os.kill(pid, signum)

        return run_stage(
            "solver", [*arguments, *more], folder, strike if signum else None, python=sglang_python
        )

    return started


@pytest.fixture(scope="module")
def killed(start):
    return start(signal.SIGKILL)


@pytest.fixture(scope="module")
def stopped(killed, start):
    return start(signal.SIGSTOP, "watchdog.policy=stop", "watchdog.cold_start_s=30", "watchdog.floor_s=30")


@pytest.fixture(scope="module")
def resumed(stopped, start):
    return start()


def test_a_killed_scheduler_ends_the_run_with_the_engine_as_culprit(killed):
    assert killed.code == 1
    assert "culprit: rollout engine" in killed.err and "Traceback" not in killed.err
    assert saved_step(killed.folder) == 1
    assert_nothing_left(killed)


def test_a_stopped_scheduler_ends_the_run_and_is_named(stopped):
    assert stopped.code == 1
    assert re.search(r"SGLang of trainer \(pid \d+\) is stopped by a signal", stopped.err), stopped.err
    assert saved_step(stopped.folder) == 1
    assert_nothing_left(stopped)


def test_a_rerun_trains_the_lost_step(resumed):
    assert resumed.code == 0, resumed.err[-3000:] + resumed.out[-6000:]
    assert saved_step(resumed.folder) == 2
    assert [line["step"] for line in resumed.lines("metrics/attempt_003.jsonl")] == [2]
