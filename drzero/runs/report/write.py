"""Writes the report of a run into its folder.

write_report(folder)                    # folder/report.html

with reported(folder):                  # and at the end of a stage
    …
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError
from drzero.ops.console import say
from drzero.ops.errors import RunFailed
from drzero.ops.files import atomic_write
from drzero.runs.run_folder import NotARun, RunFolder
from verl_ext.artefacts import announce
from verl_ext.stop_time import seconds_left

REPORT = "report.html"
_TAKES_S = 60.0
"""With less than this until the stop time a stage writes no report: 10,000 trajectories take most of it."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder; raises NotARun for a folder without a run."""
    from drzero.runs.report.page import make_page  # a stage that starts need not wait for its imports

    run = RunFolder(folder)
    path = run.folder / REPORT
    atomic_write(path, make_page(run))
    announce(path)
    return path


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Write the run's report when the body ends, well or as a failed run; never when it was only refused."""
    try:
        yield
    except (RunFailed, DataError):  # the latter also ends a synthesis whose gates refused every pair
        _write(folder)
        raise
    _write(folder)


def _write(folder: Path) -> None:
    if seconds_left() < _TAKES_S:
        say("report", f"no time is left for it; `drzero report {folder}` writes it")
        return
    try:
        say("report", f"{write_report(folder)}")
    except NotARun:  # it failed before it wrote anything
        return
    except Exception as error:  # the run is finished and its files are whole: a view of them may not fail it
        say("report", f"not written: {type(error).__name__}: {error}; `drzero report {folder}` tries again")
