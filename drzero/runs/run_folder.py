"""The folder of a run, as an argument of a command that reads it."""

from collections.abc import Sequence
from pathlib import Path

from drzero.runs.report.loop import stages
from drzero.runs.report.run_folder import NotARun, RunFolder


def run_folder(arguments: Sequence[str], command: str) -> RunFolder:
    """What `drzero COMMAND RUN_DIR` is about; raises NotARun for anything but one folder of a run."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise NotARun(f"drzero {command} takes one argument: the folder of a run (run.dir)")
    return RunFolder(Path(arguments[0]))


def last_stage(run: RunFolder) -> Path:
    """The run's folder; of a loop that of the stage which was begun last, NotARun before the first."""
    if run.kind != "loop":
        return run.folder
    begun = [run.folder.parent / stage.name for stage in stages(run) if stage.state != "pending"]
    if not begun:
        raise NotARun(f"{run.folder}: no stage has begun yet")
    return begun[-1]
