"""A launch inside its container: run the stage, commit what is whole, tell how far it is, stop in time.

    outcome = run_job(request, commit=VOLUME.commit)

The stage is a child (`drzero STAGE …`), as it would be on any machine. Around it:

* **commit** of the volume as soon as the stage announces a checkpoint, a dump or a manifest that is whole on
  disk (`verl_ext.artefacts`), every minute, and at the end. A container that dies in the middle of a write
  leaves the last committed state, and every file of ours is written beside its name first.
* **stop time**: the stage is told (`DRZERO_STOP_AT`) when the call's time or the run's money ends, makes a
  checkpoint before it, and exits with 75. A stage that has not ended `LATE_S` after that time is ended.
* **what comes next** is decided here: finished, continue in another call, out of money, or failed.
* a call that is started again by Modal (preempted, or retried) goes on from the volume; one whose launch had
  already ended returns what it had come to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.at_work import GOES_ON, other_at_work
from launch.errors import LaunchError
from launch.request import Request
from launch.spend import EVERY_S, Call, Spend, money_ends_at
from launch.status_line import status_line
from launch.volumes import MOUNTS, launch_folder, place
from ops.atomic import atomic_write
from ops.logs import say
from ops.process import Child, Command
from verl_ext.artefacts import LOG_VARIABLE

OUT_OF_TIME = 75
"""Exit code of a stage that has stopped itself at a whole checkpoint."""
MARGIN_S = 180.0
"""Between the stop time that a stage is told and the end of the call: shutting down and the last commit."""
MARGIN_SHARE = 1 / 96
"""Of the call's time, where that is more: a quarter of an hour of a day. It costs nothing, as the next call
goes on at once, and the checkpoint of a large model may take minutes to commit."""
LATE_S = 90.0
"""How long after its stop time a stage is ended that has not ended itself."""
FRUITLESS_PARTS = 2
"""Calls of a launch in a row that ended for lack of time with nothing announced: another is no use."""
STOP_GRACE_S = 20.0
"""Between SIGTERM and SIGKILL; a container that Modal takes away has 30 seconds in all."""
_POLL_S = 0.5
_STARTS_ANEW = "trainer.resume_mode=disable"
"""The override with which a call does not go on from the one before."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and what it cost."""

    state: str
    """`finished`, `continue`, `out of money`, `failed` or `interrupted`."""
    message: str
    usd: float
    """Of the run so far, all calls together."""
    exit_code: int


def run_job(
    request: Request,
    commit: Callable[[], None],
    clock: Callable[[], float] = time.time,
    app_id: str | None = None,
) -> Outcome:
    """Run one call of a launch to its end; raises LaunchError when the stage fails, for Modal to see."""
    folder = launch_folder(request.name)
    folder.mkdir(parents=True, exist_ok=True)
    if (known := _ended_before(folder, request)) is not None:
        say("launch", f"{request.name} had ended already in this launch: {known.message}")
        return known
    spend = Spend(folder)
    if (told := other_at_work(_state(folder), spend.calls, request.id, clock())) is not None:
        raise LaunchError(f"{request.name}: {told}")
    if request.action == "smoke":
        spend.calls.clear()
    job = _Job(request, folder, commit, clock, spend, app_id)
    outcome = job.run()
    if outcome.state == "failed":
        raise LaunchError(outcome.message)
    return outcome


def _ended_before(folder: Path, request: Request) -> Outcome | None:
    """What this very call came to, if Modal starts it a second time after its end."""
    state = _state(folder)
    if state is None or state["launch"] != request.id or state["part"] != request.part:
        return None
    if state["outcome"] is None or state["outcome"]["state"] in ("failed", "interrupted"):
        return None
    return Outcome(**state["outcome"])


def _fruitless_before(folder: Path, request: Request) -> int:
    """How many calls of this launch, just before this one, have come to nothing."""
    state = _state(folder)
    mine = state is not None and state["launch"] == request.id and state["part"] == request.part - 1
    return int(state["fruitless"]) if state is not None and mine else 0


def _state(folder: Path) -> dict[str, Any] | None:
    """What is known of the run's last launch; None before the first."""
    file = folder / "state.json"
    state: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return state


class _Job:
    def __init__(
        self,
        request: Request,
        folder: Path,
        commit: Callable[[], None],
        clock: Callable[[], float],
        spend: Spend,
        app_id: str | None,
    ) -> None:
        self._request, self._folder, self._commit, self._clock = request, folder, commit, clock
        self._spend, self._app_id = spend, app_id
        self._began = clock()
        self._call: Call = spend.begin(request.id, request.part, self._began, request.compute.usd_per_hour)
        timeout = request.compute.timeout
        self._call_ends = self._began + timeout - max(MARGIN_S, timeout * MARGIN_SHARE)
        self._money_ends = money_ends_at(
            self._began, spend.usd, request.compute.usd_per_hour, request.compute.max_usd
        )
        if self._money_ends < float("inf"):
            self._money_ends -= MARGIN_S
        self._artefacts = folder / "artefacts.jsonl"
        self._seen = self._artefacts.stat().st_size if self._artefacts.is_file() else 0
        self._grew = False
        self._fruitless = _fruitless_before(folder, request)

    @property
    def stop_at(self) -> float:
        """When the stage has to have ended."""
        return min(self._call_ends, self._money_ends)

    def run(self) -> Outcome:
        self._write_state(None)
        atomic_write(self._folder / "request.yaml", self._request.as_yaml())
        self._commit()
        if self._clock() >= self._money_ends:
            return self._end(self._decide(OUT_OF_TIME))
        child = Child(self._command(), grace_s=STOP_GRACE_S)
        try:
            code = self._follow(child)
        except BaseException:
            # A preempted container has half a minute: the stage ends, what is whole is kept.
            child.stop()
            self._account()
            usd = self._spend.usd
            self._write_state(Outcome("interrupted", f"{self._request.name} was interrupted", usd, 130))
            self._commit()
            raise
        finally:
            child.stop()
        return self._end(self._decide(code, child.first_error))

    def _command(self) -> Command:
        paths = [f"paths.{kind}={place(kind)}" for kind in ("corpus", "checkpoints")]
        stage, *rest = self._request.command
        return Command(
            name=self._request.name,
            command=(sys.executable, "-m", "pipeline.cli", stage, *paths, *rest),
            log_path=self._folder / "console.log",
            env={
                "DRZERO_STOP_AT": str(self.stop_at),
                LOG_VARIABLE: str(self._artefacts),
            },
        )

    def _follow(self, child: Child) -> int:
        """Until the child's end: commits, status lines, and an end put to one that is late."""
        told = self._clock()
        while (code := child.poll()) is None:
            now = self._clock()
            if self._announced():
                self._keep()
            if now - told >= EVERY_S:
                told = now
                self._account()
                self._tell()
                self._keep()
            if now > self.stop_at + LATE_S:
                say("launch", f"{self._request.name} did not stop in time by itself and is ended")
                child.stop()
                return child.poll() or OUT_OF_TIME
            time.sleep(_POLL_S)
        self._announced()
        return code

    def _keep(self) -> None:
        """Commit while the stage runs; whatever a commit raises, the next one, a minute later, makes good."""
        try:
            self._commit()
        except Exception as error:
            say("launch", f"the volume could not be committed, next try within a minute: {error}")

    def _announced(self) -> bool:
        """Whether the stage has announced something whole since the last look."""
        size = self._artefacts.stat().st_size if self._artefacts.is_file() else 0
        if size == self._seen:
            return False
        self._seen = size
        self._grew = True
        return True

    def _account(self) -> None:
        self._call.until = self._clock()
        self._spend.write()

    def _tell(self) -> None:
        try:
            line = status_line(self._request, self._spend.usd, self._clock() - self._began)
        except (OSError, ValueError) as error:
            # Files that the stage is writing at this moment; no reason to end what is paid for.
            line = f"no status this time: {error}"
        say("launch", line)

    def _decide(self, code: int, first_error: str | None = None) -> Outcome:
        self._account()
        usd, name, limit = self._spend.usd, self._request.name, self._request.compute.max_usd
        if code == 0:
            return Outcome("finished", f"{name} is finished", usd, code)
        late = self._clock() >= self.stop_at
        if code != OUT_OF_TIME and not late:
            because = f": {first_error}" if first_error else ""
            return Outcome("failed", f"{name} ended with exit code {code}{because}", usd, code)
        if self._money_ends <= self._call_ends:
            advice = "raise compute.max_usd and launch it again to go on from its last checkpoint"
            return Outcome(
                "out of money", f"{name}: ${usd:.2f} of ${limit:.2f} is spent: {advice}", usd, code
            )
        if code != OUT_OF_TIME:
            return Outcome(
                "failed",
                f"{name} reached no checkpoint within compute.timeout={self._request.compute.timeout} s: "
                "raise it, or lower trainer.save_freq",
                usd,
                code,
            )
        if _STARTS_ANEW in self._request.command:
            return Outcome(
                "failed",
                f"{name} did not end within compute.timeout={self._request.compute.timeout} s, and with "
                f"{_STARTS_ANEW} another call would start anew: raise it",
                usd,
                code,
            )
        if self._fruitless + (not self._grew) >= FRUITLESS_PARTS:
            return Outcome(
                "failed",
                f"{name}: {FRUITLESS_PARTS} calls of compute.timeout={self._request.compute.timeout} s have "
                "come to nothing: raise it",
                usd,
                code,
            )
        return Outcome(GOES_ON, f"{name} goes on in another call", usd, code)

    def _end(self, outcome: Outcome) -> Outcome:
        say("launch", f"{outcome.message}; ${outcome.usd:.2f} so far")
        self._write_state(outcome)
        self._commit()
        return outcome

    def _write_state(self, outcome: Outcome | None) -> None:
        state = {
            "launch": self._request.id,
            "part": self._request.part,
            "action": self._request.action,
            "app": self._app_id,
            "began": self._began,
            "fruitless": 0 if self._grew else self._fruitless + 1,
            "outcome": asdict(outcome) if outcome else None,
        }
        atomic_write(self._folder / "state.json", json.dumps(state, indent=1))


def run_module(module: str, words: list[str]) -> int:
    """Run `python -m MODULE WORDS…` here, its output ours; returns its exit code.

    `{corpus}` and `{checkpoints}` in a word become the folders of the volumes.
    """
    folders = {kind: str(place(kind)) for kind in MOUNTS}
    for kind, folder in folders.items():
        words = [word.replace(f"{{{kind}}}", folder) for word in words]
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode
