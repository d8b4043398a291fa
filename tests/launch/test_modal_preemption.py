"""A launch whose containers are taken away at each point of its life: its call is neither lost nor doubled.

Client, claims, commits and supervision are the launcher's own, on the plane of
tests/modal_plane. The stage is a stand-in that writes numbered steps to the volume and can be held at one.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from modal_checkout import make_checkout, start_action
from modal_plane import ControlPlane
from modal_plane.client import Client, Done
from modal_plane.state import Call

pytestmark = pytest.mark.slow("a container or two for each case")

STEPS = 6
STAGE = '''
"""Writes a step a moment, with its file open all the time; waits at step HELD until the gate is open."""

import os
import sys
import time
from pathlib import Path

from drzero.ops.artefacts import announce

(root,) = [word.partition("=")[2] for word in sys.argv if word.startswith("paths.checkpoints=")]
steps = Path(root, "solver_iter1", "steps.txt")
steps.parent.mkdir(exist_ok=True)
first = len(steps.read_text().splitlines()) if steps.is_file() else 0
print(f"stage from step {first}", flush=True)
with steps.open("a") as file:
    for step in range(first, %(steps)d):
        while step == %(held)d and not Path(os.environ["GATE"]).exists():
            time.sleep(0.05)
        print(step, file=file, flush=True)
        announce(steps)
        print(f"step {step}", flush=True)
        time.sleep(0.1)
'''
HELD = 3


class Launcher:
    """A checkout with the stand-in, and a plane."""

    def __init__(self, plane: ControlPlane, checkout: Path, gate: Path) -> None:
        self.plane, self.checkout, self.gate = plane, checkout, gate
        self.volume = plane.volume("dr-zero-checkpoints")

    def stages(self) -> list[Call]:
        """The calls on the requested machine."""
        return [call for call in self.plane.calls if call.function == "cpu_stage"]

    def held(self) -> Call:
        """The stage's call, once it waits at the held step and earlier steps are committed."""
        ready = self.plane.wait_for(
            lambda: [call for call in self.stages() if f"step {HELD - 1}" in call.logs], "the held step"
        )
        self.plane.wait_for(lambda: len(self.committed()) == HELD, "the commit of what is before")
        return ready[0]

    def committed(self) -> list[str]:
        steps = self.volume.committed() / "solver_iter1" / "steps.txt"
        return steps.read_text().split() if steps.is_file() else []

    def preempt_at_a_commit(self, call: Call) -> None:
        """Take the container away while a commit of the checkpoints is under way."""
        self.plane.wait_for(lambda: self.volume.waiting, "a commit")
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self.plane.preempt, call)
            self.volume.open.set()
            taken.result()

    def once(self, done: Done, attempts: int) -> None:
        """Each step was made once and is on the volume, by one call of so many attempts."""
        done.succeeded()
        assert self.committed() == [str(step) for step in range(STEPS)]
        ran = [call for call in self.stages() if "stage from step" in call.logs]
        assert [call.attempts for call in ran] == [attempts]
        paid = json.loads((self.volume.committed() / "launches" / "solver_iter1" / "spend.json").read_text())
        assert len({(call["launch"], call["part"]) for call in paid}) == 1
        for call in self.plane.calls:
            came = f"{call.function} {call.function_call_id} of {call.parent or 'the client'}"
            print(f"{came}: {call.status}, {call.attempts} attempts")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=False)
    (checkout / "drzero" / "cli.py").write_text(STAGE % {"steps": STEPS, "held": HELD})
    return checkout


@pytest.fixture
def launcher(tmp_path, checkout):
    gate = tmp_path / "gate"
    with ControlPlane(tmp_path / "plane", container_env={"GATE": str(gate)}, grace=40) as plane:
        plane.answer("ask", lambda module, words: 0)
        yield Launcher(plane, checkout, gate)


def launch(launcher: Launcher) -> Client:
    return start_action(launcher.plane, launcher.checkout, "solver", "--iteration", "1", "--gpu-count", "0")


@pytest.mark.parametrize("how", ["preempt", "kill"])
def test_the_run_between_two_steps(launcher, how):
    client = launch(launcher)
    getattr(launcher.plane, how)(launcher.held())
    launcher.gate.touch()
    launcher.once(client.wait(120), attempts=2)


@pytest.mark.parametrize("is_last", [False, True])
def test_the_run_during_a_commit(launcher, is_last):
    client = launch(launcher)
    call = launcher.held()
    launcher.volume.open.clear()
    launcher.gate.touch()
    if is_last:
        launcher.plane.wait_for(lambda: "solver_iter1 is finished" in call.logs, "the stage's end")
    launcher.preempt_at_a_commit(call)
    launcher.once(client.wait(120), attempts=2)
