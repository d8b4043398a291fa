"""The folder of a self-evolution loop: its stages by iteration, and their own runs."""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drzero.runs.run_folder import NotARun, RunFolder


@dataclass(frozen=True)
class StageState:
    """The manifest's record of a stage."""

    name: str
    state: str
    seconds: float  # over all starts, the present one included
    tokens: int
    figures: Mapping[str, Any]
    error: str | None
    page: str | None  # its report, relative to the loop's

    @property
    def iteration(self) -> int:
        """Counted from 1. The evaluation of the base model has 0."""
        found = re.search(r"_iter(\d{1,9})$", self.name, re.ASCII)
        return int(found[1]) if found else 0


def stages(loop: RunFolder) -> list[StageState]:
    """The stages in the order of the manifest."""
    found = []
    for name, entry in loop.entries.items():
        page = f"../{name}/report.html"
        is_killed = entry.get("state") == "running" and not loop.is_running
        found.append(
            StageState(
                name=name,
                state="killed" if is_killed else str(entry.get("state")),
                seconds=float(entry.get("seconds") or 0) + _seconds_open(loop, name, entry),
                tokens=int(entry.get("tokens") or 0),
                figures=entry.get("figures") or {},
                error=entry.get("error"),
                page=page if (loop.folder / page).is_file() else None,
            )
        )
    return found


def _seconds_open(loop: RunFolder, name: str, entry: Mapping[str, Any]) -> float:
    """What a start that never ended took: until now, or until the stage's log was last written."""
    if entry.get("state") != "running" or not entry.get("started"):
        return 0.0
    ended = time.time()
    if not loop.is_running:
        with suppress(OSError):
            ended = (loop.folder / "logs" / f"{name}.log").stat().st_mtime
    return max(ended - float(entry["started"]), 0.0)


def progress(loop: RunFolder) -> str:
    """How far a loop is that has not finished, in a sentence, else nothing."""
    all_of = stages(loop)
    done = [stage for stage in all_of if stage.state == "complete"]
    count = f"{len(done)} of {len(all_of)} stages are complete"
    left = [stage for stage in all_of if stage.state != "complete"]
    if not left:
        return ""
    if not loop.is_running:
        place = "before" if left[0].state == "pending" else "in"
        return f"It ended {place} {left[0].name}: {count}."
    if left[0].state == "running":
        return f"{left[0].name} has run for {left[0].seconds / 60:.1f} minutes: {count}."
    return f"{left[0].name} comes next: {count}."


def stage_runs(loop: RunFolder) -> list[RunFolder]:
    """The runs of the stages that hold trajectories, in the order of the manifest."""
    kept = ("dumps", "samples.jsonl", "answers.jsonl")
    folders = [loop.folder.parent / name for name in loop.entries]
    return [RunFolder(folder) for folder in folders if any((folder / name).exists() for name in kept)]


def last_stage(run: RunFolder) -> Path:
    """The run's folder, or of a loop the folder of the stage begun last. Raises NotARun before the first."""
    if run.kind != "loop":
        return run.folder
    begun = [run.folder.parent / stage.name for stage in stages(run) if stage.state != "pending"]
    if not begun:
        raise NotARun(f"{run.folder}: no stage has begun yet")
    return begun[-1]


def versions(loop: RunFolder) -> str | None:
    """The package versions that the last stage recorded."""
    recorded = [entry["versions"] for entry in loop.entries.values() if entry.get("versions")]
    return ", ".join(f"{name} {version}" for name, version in recorded[-1].items()) if recorded else None
