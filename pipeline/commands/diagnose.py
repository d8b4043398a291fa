"""`drzero diagnose RUN_DIR`: how a run ended and why, from its logs and samples alone.

drzero diagnose outputs/checkpoints/challenger_iter1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ops.errors import UserError
from ops.process.lock import lock_is_held
from ops.watchdog.post_mortem import Death, examine
from pipeline.stages.watch import CAUSES

_MARKS = ("resolved.yaml", "logs", "heartbeats.jsonl")


class NotARun(UserError):
    """The folder holds no run."""


def run_diagnose(arguments: Sequence[str]) -> None:
    """Print how the run in a folder ended; raises NotARun for a folder without a run."""
    if len(arguments) != 1:
        raise NotARun("drzero diagnose takes one argument: the folder of a run (run.dir)")
    folder = Path(arguments[0])
    if not folder.is_dir():
        raise NotARun(f"{folder} is no folder")
    if not any((folder / mark).exists() for mark in _MARKS):
        inside = sorted(path.parent.name for path in folder.glob("*/logs"))
        hint = f"; runs in it: {', '.join(inside)}" if inside else ""
        raise NotARun(f"{folder} holds no run: none of {', '.join(_MARKS)} is there{hint}")
    death = examine(folder, CAUSES)
    _print(folder, death, running=lock_is_held(folder / "lock"))


def _print(folder: Path, death: Death, running: bool) -> None:
    console = Console(width=110, highlight=False)

    def line(name: str, text: str) -> None:
        console.print(f"  {name:<14}{text}", markup=False, soft_wrap=True)

    state = f"still running; until now: {death.state}" if running else death.state
    console.print(f"{folder}: {state}", markup=False, soft_wrap=True)
    if running and death.state != "stalled":
        return
    line("what", death.sentence)
    if death.culprit:
        line("culprit", death.culprit)
    if death.first_error:
        line("first error", death.first_error)
    if death.advice:
        line("what to do", death.advice)
    for place, evidence in enumerate(death.evidence):
        line("" if place else "evidence", evidence)
    for name, fact in death.facts.items():
        line(name, fact)
    log = folder / "logs" / f"{death.culprit}.log"
    if log.is_file():
        line("log", str(log))
