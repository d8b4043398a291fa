"""`drzero stacks RUN_DIR`: where every Python process of a live run stands now, grouped and compared by rank.

    drzero stacks outputs/checkpoints/challenger_iter1      # from another terminal than the run's
    drzero stacks outputs/checkpoints/evolve                # of a loop: the stage begun last

It reads the same as the watchdog at a stall, and writes the same page (`RUN_DIR/logs/stacks_001.md`). Nothing
is stopped or slowed down: py-spy reads the processes' memory. The run's lock names the stage's own process,
which has all others below it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from drzero.ops.flow.workers import read_workers
from drzero.ops.notices import one_line
from drzero.ops.process.child import components_of
from drzero.ops.process.lock import lock_holder
from drzero.ops.records import FLOW_FILE
from drzero.ops.resources.sampler import disk_free_gb
from drzero.ops.watchdog.collect import STAGE, first_error, run_stacks
from drzero.ops.watchdog.collectives import position_of
from drzero.ops.watchdog.diagnosis import (
    STARVATION,
    UNKNOWN,
    Diagnosis,
    Landmarks,
    ServiceFact,
    Situation,
    diagnose,
    ranks_of,
)
from drzero.ops.watchdog.movement import Patience, Stall
from drzero.ops.watchdog.report import grouped, last_line, next_page, stall_report
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console
from drzero.runs.loop_folder import last_stage
from drzero.runs.run_folder import RunFolder, named_run
from drzero.runs.view.run_state import RunFacts, RunFiles, RunState
from drzero.stages.nodes import read_elsewhere
from drzero.stages.watch import LANDMARKS, PROGRESS

_DEADLINE_S = 20.0  # For all dumps together. On a busy machine a single one takes seconds.
NO_STALL = "no stall"


def run_stacks_now(arguments: Sequence[str]) -> None:
    """Print where a live run stands, and write the page. Raises NotARun, or CheckError without access."""
    run = RunFolder(last_stage(named_run(arguments, "stacks")))
    began = time.monotonic()
    look = _look(run, _stage_of(run.folder))
    diagnosis = look.diagnosis()
    page = next_page(run.folder / "logs", "stacks")
    page.parent.mkdir(exist_ok=True)
    streams = {FLOW_FILE: last_line(run.folder / FLOW_FILE)}
    seconds = time.monotonic() - began
    text = stall_report(look.situation, diagnosis, look.landmarks, look.state.usage, streams, seconds)
    page.write_text(text, encoding="utf-8")
    out = console()
    for line in _lines(arguments[0], look, diagnosis, page, seconds):
        out.print(one_line(line), soft_wrap=True)


def _stage_of(folder: Path) -> int:
    """The pid of the run's own process. Raises CheckError if it cannot be read from here."""
    lock = folder / "lock"
    if (pid := lock_holder(lock)) is None:
        raise CheckError(f"{folder} is not running: `drzero diagnose {folder}` has how it ended")
    try:
        open_files = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        raise CheckError(
            f"{folder} is run by another user (pid {pid}), whose processes py-spy may not read: repeat as "
            "that user or as root"
        ) from None
    except OSError:
        open_files = []
    # A pid of another machine or container means another process here, or none.
    held = []
    for file in open_files:
        with suppress(OSError):  # closed meanwhile, or a socket
            held.append(os.path.samefile(file, lock))
    if not any(held):
        raise CheckError(
            f"{folder} is run by process {pid} of another machine or container: repeat this there (on Modal: "
            f"--action stacks {folder.name})"
        )
    return pid


@dataclass(frozen=True)
class _Look:
    state: RunState
    situation: Situation
    landmarks: Landmarks
    stall: dict[str, Any] | None  # the event of a lasting stall, as the run's own watchdog reported it

    @property
    def where(self) -> str:
        step = f" of step {self.situation.step}" if self.state.beats else ""
        return f"{self.situation.phase}{step}"

    def diagnosis(self) -> Diagnosis:
        """Diagnose the stall. For a run that moves, name what would be odd about its stacks in a stall."""
        if self.stall is not None:
            return diagnose(self.situation, self.landmarks)
        # An error in a log explains a stall only if it came right before it.
        found = diagnose(replace(self.situation, errors={}), self.landmarks)
        sentence, evidence = "no stall has been reported", found.evidence
        if found.pattern == STARVATION:
            sentence += ", and the trainer waits for its batch, as it does in every rollout"
        elif found.pattern == UNKNOWN:
            sentence, evidence = f"{sentence}, and nothing in its stacks is odd", ()
        else:
            sentence += f"; these stacks look like {found.sentence} (culprit: {found.culprit})"
        return Diagnosis(NO_STALL, self.where, sentence, evidence)


def _look(run: RunFolder, stage: int) -> _Look:
    """Read the stacks and the run's files. Raises CheckError if py-spy may read no stack at all."""
    folder, now = run.folder, time.time()
    files = RunFiles(folder, RunFacts(run.name))
    files.poll()
    state = files.state
    try:
        roots = components_of(stage)
    except psutil.Error:
        raise CheckError(f"{folder} has ended just now: `drzero diagnose {folder}` has how") from None
    env = {name: str(value) for name, value in (run.setting("process_env") or {}).items()}
    there = read_elsewhere(run.setting("machine.ray_address"), env, _DEADLINE_S, native=False)
    stacks = [*run_stacks(roots, _DEADLINE_S, native=False, stage=stage), *there.stacks]
    failures = [stack.failure for stack in stacks if stack.failure]
    if failures and not any(stack.threads for stack in stacks):
        raise CheckError(
            f"py-spy can read none of the run's processes ({failures[0]}): repeat as root or with "
            "CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0"
        )
    main, logs = _logs(run)
    stall = run.lasting_stall
    phase = state.phase if main or state.beats else run.kind
    situation = Situation(
        phase=phase,
        step=state.step,
        stall=_stillness(run, phase, now - (state.phase_began or now), stall, now),
        stacks=stacks,
        services=[ServiceFact(name, is_) for name, is_ in state.components.items() if name != main],
        workers=read_workers(folder / PROGRESS, now, [stack.pid for stack in stacks]),
        errors={name: line for name, log in logs.items() if (line := first_error(*log)) is not None},
        disk_free_gb=disk_free_gb(folder),
        unseen=there.unseen,
    )
    # A stage without a main command works in its own process.
    return _Look(state, situation, replace(LANDMARKS, driver=main or STAGE), stall)


def _stillness(run: RunFolder, phase: str, phase_s: float, stall: dict[str, Any] | None, now: float) -> Stall:
    """The lasting stall with its length by now, else a stall of kind `asked`."""
    if stall is not None:
        silent = now - stall["time"] + stall["silent_s"]
        return Stall("phase", stall["phase"], str(stall["text"]), silent, stall["limit_s"])
    limit = float(run.setting("watchdog.cold_start_s") or Patience().cold_start_s)
    return Stall("asked", phase, "it was asked for by `drzero stacks`", phase_s, limit)


def _logs(run: RunFolder) -> tuple[str | None, dict[str, tuple[Path, int]]]:
    main, logs = None, {}
    for event in run.events:
        if event["kind"] == "start" and event.get("log"):
            main = event["component"] if "offset" in event else main
            log = run.folder / "logs" / Path(event["log"]).name
            logs[str(event["component"])] = log, int(event.get("offset", 0))
    return main, logs


def _lines(name: str, look: _Look, diagnosis: Diagnosis, page: Path, seconds: float) -> Iterator[str]:
    situation, marks = look.situation, look.landmarks
    read = sum(bool(stack.threads) for stack in situation.stacks)
    silent = f"{situation.stall.silent_s:.0f} s"
    yield f"{name}: {look.where} for {silent}; {read} Python processes, read in {seconds:.1f} s"
    ranks = [f"{marks.who(stack)}: {position_of(stack)}" for stack in ranks_of(situation.stacks, marks)]
    for line in (*grouped(situation.stacks, marks), *ranks):
        yield f"  {line}"
    for stack in situation.stacks:
        if stack.failure:
            yield f"  {marks.who(stack)}, pid {stack.pid}, could not be read: {stack.failure}"
    rows = [
        ("verdict", diagnosis.sentence),
        ("culprit", diagnosis.culprit if look.stall else ""),
        *(("evidence", line) for line in diagnosis.evidence if line not in ranks),
        ("what to do", diagnosis.advice),
        ("page", str(page)),
    ]
    for head, text in rows:
        if text:
            yield f"  {head:<14}{text}"
