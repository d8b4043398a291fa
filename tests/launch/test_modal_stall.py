"""A launch whose run hangs: you can look into it, and it ends the bill.

The trainer is a small process that sends heartbeats until a gate opens, and then stops, at every start.
Everything else is real.

"""

from __future__ import annotations

import json

import pytest
from modal_checkout import make_checkout, run_action, start_action
from modal_plane import ControlPlane

pytestmark = pytest.mark.slow("a run on the plane that stalls twice; test_container.py has the message")

COMMAND_LINE = '''
"""The real command line, but that the solver has hanging.py for its trainer, and no services."""

import sys
from pathlib import Path

from drzero.ops.process.child import Command
from drzero import real_cli
from drzero.recipe.compose import resolve
from drzero.stages import training


def trainer_command(config, folder, recorder):
    words = (sys.executable, str(Path(__file__).with_name("hanging.py")), str(folder))
    return Command(name="trainer", command=words, log_path=folder / "logs" / "trainer.log")


training.trainer_command = trainer_command
training.run_solver = lambda config, view: training.train(resolve(config), [], view)
sys.exit(real_cli.main())
'''
HANGING = """
import json
import os
import signal
import sys
import time
from pathlib import Path


def beat(step, phase):
    with (Path(sys.argv[1]) / "heartbeats.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "step": step, "phase": phase}) + "\\n")


def wait_for_batch(step):
    beat(step, "rollout")
    time.sleep(0.5)
    beat(step, "update")


step = 0
print("trainer begins", flush=True)
while not Path(os.environ["GATE"]).exists():
    step += 1
    wait_for_batch(step)
beat(step + 1, "rollout")
os.kill(os.getpid(), signal.SIGSTOP)
"""
RUN = "solver_iter1"
LIMITS = ("watchdog.cold_start_s=6", "watchdog.floor_s=6")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=False)
    (folder / "drzero" / "cli.py").rename(folder / "drzero" / "real_cli.py")
    (folder / "drzero" / "cli.py").write_text(COMMAND_LINE)
    (folder / "drzero" / "hanging.py").write_text(HANGING)
    return folder


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def plane(tmp_path_factory, gate):
    environment = {"GATE": str(gate), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ControlPlane(tmp_path_factory.mktemp("plane"), container_env=environment, grace=40) as plane:
        yield plane


@pytest.fixture(scope="module")
def client(plane, checkout):
    plane.answer("ask", lambda module, words: 0)
    words = ("solver", "--iteration", "1", "--gpu-count", "0", "env=demo", *LIMITS)
    client = start_action(plane, checkout, *words)
    beats = plane.volume("dr-zero-checkpoints").committed() / RUN / "heartbeats.jsonl"
    plane.wait_for(lambda: client.has_ended or beats.exists(), "a committed step", 240)
    return client


@pytest.fixture(scope="module")
def looked(plane, checkout, client):
    return run_action(plane, checkout, "stacks", RUN)


@pytest.fixture(scope="module")
def ended(plane, client, looked, gate):
    gate.touch()
    return client.wait(240)


def launched(plane: ControlPlane, name: str) -> str:
    return (plane.volume("dr-zero-checkpoints").committed() / "launches" / RUN / name).read_text()


def test_a_running_launch_says_where_its_processes_stand(looked):
    looked.succeeded()
    assert f"/{RUN}: " in looked.stdout and "Python processes, read in" in looked.stdout
    assert "(drzero/hanging.py:" in looked.stdout, "the trainer"
    assert "_until_its_end (drzero/ops/supervisor.py:" in looked.stdout, "the stage that supervises it"
    assert "no stall has been reported" in looked.stdout
    assert f"--action download {RUN}/logs has the page" in looked.stdout


def test_its_page_is_on_the_volume(plane, ended):
    page = plane.volume("dr-zero-checkpoints").committed() / RUN / "logs" / "stacks_001.md"
    assert "(drzero/hanging.py:" in page.read_text()


def test_a_run_that_hangs_is_resumed_once_and_then_ends_its_call_with_the_verdict(plane, ended):
    assert ended.code == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"modal_train: {RUN} stalled and was stopped: trainer (pid ")
    assert "is stopped by a signal (culprit: trainer)" in last
    assert f"--action download {RUN}/logs/stall_002.md" in last
    log = plane.volume("dr-zero-checkpoints").committed() / RUN / "logs" / "trainer.log"
    assert log.read_text().count("trainer begins") == 2
    assert json.loads(launched(plane, "state.json"))["outcome"]["state"] == "failed"
    assert len(json.loads(launched(plane, "spend.json"))) == 1, "no further call"


def test_status_has_the_verdict(plane, checkout, ended):
    plane.answer_no_more("ask")
    done = run_action(plane, checkout, "status").succeeded()
    assert f"{RUN} stalled and was stopped: trainer (pid " in done.stdout


def test_what_is_not_running_is_refused(plane, checkout, ended):
    done = run_action(plane, checkout, "stacks", RUN)
    assert done.code == 1
    assert f"modal_train: stacks: no launch of '{RUN}' is running: --action diagnose {RUN}" in done.stderr
