"""A launch inside its container: run the stage, commit complete files, log progress, stop in time.

The stage is a child, `drzero STAGE …`. Volumes are committed when it announces a complete file
(`drzero.ops.artefacts`), every minute, and at the end. Before time or money is used up (`DRZERO_STOP_AT`), it
saves a checkpoint and exits with 75. A call that Modal restarts resumes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drzero.launch.commits import Commits, CommittedVolume
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import ROOT
from drzero.launch.request import Request
from drzero.launch.spend import CONTINUES, EVERY_S, Spend, money_ends_at
from drzero.launch.status import stall_of, status_line
from drzero.launch.volumes import MOUNTS, folder_overrides, launch_folder, place
from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.console import say
from drzero.ops.errors import OutOfTime
from drzero.ops.files import atomic_write
from drzero.ops.process.child import Child, Command
from environments.fault import SAME_PACKAGES

OUT_OF_TIME = OutOfTime.exit_code
MARGIN_S = 180.0
"""Seconds left for shutdown and last commit between the stage's stop time and the end of the call."""
MARGIN_SHARE = 1 / 96
"""The same as a share of the call's time, if more. A large checkpoint takes minutes to commit."""
LATE_S = 90.0  # seconds after its stop time when a running stage is stopped
FRUITLESS_PARTS = 2
"""A launch fails after this many consecutive calls that ran out of time without saving anything."""
STOP_GRACE_S = 20.0  # Seconds between SIGTERM and SIGKILL. A preempted container has 30 seconds in all.
_POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and the run's cost."""

    state: str
    message: str
    usd: float
    exit_code: int


def run_job(
    request: Request,
    volumes: Mapping[str, CommittedVolume],
    clock: Callable[[], float] = time.time,
    app_id: str | None = None,
) -> Outcome:
    """Run one call of a launch. Raises LaunchError if the stage fails, so that Modal retries."""
    folder = launch_folder(request.name)
    folder.mkdir(parents=True, exist_ok=True)
    state, spend = _state(folder), Spend(folder)
    if state is not None and (state["launch"], state["part"]) == (request.id, request.part):
        # Modal has restarted this very call.
        outcome = state["outcome"]
        if outcome is not None and outcome["state"] not in ("failed", "interrupted"):
            say("launch", f"{request.name} had already ended in this launch: {outcome['message']}")
            return Outcome(**outcome)
    if request.action == "smoke":
        spend.calls.clear()
    with (
        tempfile.TemporaryDirectory(prefix="drzero-launch-") as local,
        closing(Commits(volumes, folder, Path(local) / "console.log")) as commits,
    ):
        outcome = _Job(request, folder, Path(local), commits, clock, spend, app_id).run()
    if outcome.state == "failed":
        raise LaunchError(outcome.message)
    return outcome


def _state(folder: Path) -> dict[str, Any] | None:
    file = folder / "state.json"
    state: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return state


@dataclass
class _Job:
    request: Request
    folder: Path
    local: Path
    commits: Commits
    clock: Callable[[], float]
    spend: Spend
    app_id: str | None

    def __post_init__(self) -> None:
        request, compute = self.request, self.request.compute
        self._began = self.clock()
        self._call = self.spend.begin(request.id, request.part, self._began, compute.usd_per_hour)
        self._call_ends = self._began + compute.timeout - max(MARGIN_S, compute.timeout * MARGIN_SHARE)
        self._money_ends = money_ends_at(self._began, self.spend.usd, compute.usd_per_hour, compute.max_usd)
        if self._money_ends < float("inf"):
            self._money_ends -= MARGIN_S
        self._artefacts = self.local / "artefacts.jsonl"
        self._seen = 0  # bytes of the list of complete files, which only grows
        state, before = _state(self.folder), (request.id, request.part - 1)
        follows = state is not None and (state["launch"], state["part"]) == before
        self._fruitless = int(state["fruitless"]) if state is not None and follows else 0
        """Calls of this launch directly before this one that saved nothing."""

    @property
    def stop_at(self) -> float:
        return min(self._call_ends, self._money_ends)

    def run(self) -> Outcome:
        self._write_state(None)
        atomic_write(self.folder / "request.yaml", self.request.as_yaml())
        if failed := self.commits.commit():
            raise LaunchError(f"{self.request.name} was not started: a volume cannot be committed: {failed}")
        if self.clock() >= self._money_ends:
            return self._end(self._decide(OUT_OF_TIME))
        child = Child(self._command(), grace_s=STOP_GRACE_S)
        try:
            code = self._follow(child)
        except BaseException:
            # A preempted container has half a minute: stop the stage and commit complete files.
            child.stop()
            self._account()
            usd = self.spend.usd
            self._write_state(Outcome("interrupted", f"{self.request.name} was interrupted", usd, 130))
            self.commits.close()
            self.commits.commit()
            raise
        finally:
            child.stop()
        return self._end(self._decide(code, child.first_error))

    def _command(self) -> Command:
        stage, *rest = self.request.command
        module = "drzero.launch.smoke.run" if self.request.action == "smoke" else "drzero.cli"
        script = self.request.script
        program = [str(ROOT / script)] if script else ["-m", module, stage]
        return Command(
            name=self.request.name,
            command=(sys.executable, *program, *folder_overrides(), *rest),
            log_path=self.local / "console.log",
            env={"DRZERO_STOP_AT": str(self.stop_at), LOG_VARIABLE: str(self._artefacts)},
            relays=True,
        )

    def _follow(self, child: Child) -> int:
        """Request commits and log until the child ends or is late. Returns its exit code."""
        logged = self.clock()
        while (code := child.poll()) is None:
            now = self.clock()
            if self._announced():
                self.commits.request()
            if now - logged >= EVERY_S:
                logged = now
                self._account()
                say("launch", status_line(self.request, self.spend.usd, now - self._began))
                self.commits.request()
            if now > self.stop_at + LATE_S:
                say("launch", f"{self.request.name} did not stop in time by itself and is stopped")
                child.stop()
                return child.poll() or OUT_OF_TIME
            time.sleep(_POLL_S)
        self._announced()
        return code

    def _announced(self) -> bool:
        size = self._artefacts.stat().st_size if self._artefacts.is_file() else 0
        if size == self._seen:
            return False
        self._seen = size
        return True

    def _account(self) -> None:
        self._call.until = self.clock()
        self._call.failed_commits = self.commits.failed
        self.spend.write()

    def _decide(self, code: int, first_error: str | None = None) -> Outcome:
        self._account()
        name, timeout = self.request.name, f"compute.timeout={self.request.compute.timeout} s"

        def outcome(state: str, message: str) -> Outcome:
            return Outcome(state, f"{name} {message}", self.spend.usd, code)

        if code == 0:
            return outcome("finished", "is finished")
        if code != OUT_OF_TIME and self.clock() < self.stop_at:
            if stall := stall_of(self.request, self._began):
                return outcome("failed", f"stalled and was stopped: {stall}")
            because = f": {first_error}" if first_error else ""
            return outcome("failed", f"ended with exit code {code}{because}")
        if self._money_ends <= self._call_ends:
            spent = f"${self.spend.usd:.2f} of ${self.request.compute.max_usd:.2f}"
            advice = "raise compute.max_usd and launch it again to resume from its last checkpoint"
            return outcome("out of money", f"has spent {spent}: {advice}")
        if code != OUT_OF_TIME:
            advice = "raise it, or lower trainer.save_freq"
            return outcome("failed", f"reached no checkpoint within {timeout}: {advice}")
        if not self.request.resumes:
            reason = "another call would start from the beginning: raise it"
            return outcome("failed", f"did not end within {timeout}, and {reason}")
        if self._fruitless + (not self._seen) >= FRUITLESS_PARTS:
            return outcome("failed", f"saved nothing in {FRUITLESS_PARTS} calls of {timeout}: raise it")
        return outcome(CONTINUES, "continues in another call")

    def _end(self, outcome: Outcome) -> Outcome:
        say("launch", f"{outcome.message}; ${outcome.usd:.2f} so far")
        self._write_state(outcome)
        self.commits.finish()
        return outcome

    def _write_state(self, outcome: Outcome | None) -> None:
        state = {
            "launch": self.request.id,
            "part": self.request.part,
            "action": self.request.action,
            "app": self.app_id,
            "began": self._began,
            "fruitless": 0 if self._seen else self._fruitless + 1,
            "outcome": asdict(outcome) if outcome else None,
        }
        atomic_write(self.folder / "state.json", json.dumps(state, indent=1))


def run_module(module: str, words: list[str]) -> int:
    """Run `python -m MODULE WORDS…` here, with the folders of `{corpus}` and `{checkpoints}`."""
    for kind in MOUNTS:
        words = [word.replace(f"{{{kind}}}", str(place(kind))) for word in words]
    command = [sys.executable, "-m", module, *words]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", SAME_PACKAGES: "1"}
    return subprocess.run(command, check=False, env=env).returncode
