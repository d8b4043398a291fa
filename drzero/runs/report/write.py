"""`drzero report RUN_DIR`: a run as one HTML file, or as a page that follows it.

    drzero report outputs/checkpoints/demo              writes report.html there, for any browser
    drzero report outputs/checkpoints/evolve            a loop: scores by iteration, what gates refused
    drzero report outputs/checkpoints/demo --watch      serves it on 127.0.0.1 until Ctrl-C, and refreshes it
    drzero report outputs/checkpoints/demo --watch --port 8042

Stages and the loop write the file when they end. Use this command for a killed run. The file loads nothing
from anywhere, but its links lead to the run's own files, so move them together.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from data.errors import DataError
from drzero.ops.artefacts import announce
from drzero.ops.console import say
from drzero.ops.errors import RunFailed, UserError
from drzero.ops.files import atomic_write
from drzero.ops.stop_time import seconds_left
from drzero.runs.run_folder import NotARun, RunFolder

REPORT = "report.html"
_TAKES_S = 60.0
"""With less time than this left, a stage writes no report. 10,000 trajectories take most of it."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder. Raises NotARun for a folder without a run."""
    from drzero.runs.report.page import make_page  # slow to import, and a stage that starts does not need it

    run = RunFolder(folder)
    path = run.folder / REPORT
    atomic_write(path, make_page(run))
    announce(path)
    return path


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Write the run's report when the block succeeds or the run fails, but not if it was refused."""
    try:
        yield
    except (RunFailed, DataError):  # DataError: a synthesis whose gates refused every pair
        refresh_report(folder)
        raise
    refresh_report(folder)


def refresh_report(folder: Path) -> None:
    """Write the run's report if there is time. A failure is only printed."""
    if seconds_left() < _TAKES_S:
        say("report", f"no time is left for it; `drzero report {folder}` writes it")
        return
    try:
        say("report", f"{write_report(folder)}")
    except NotARun:  # it failed before it wrote anything
        return
    except Exception as error:  # the run is finished, and a view of it must not fail it
        say("report", f"not written: {type(error).__name__}: {error}; `drzero report {folder}` tries again")


def run_report(arguments: Sequence[str]) -> None:
    """Write the report and print its path, or serve it. Raises NotARun for a folder without a run."""
    words = list(arguments)
    port = _take_port(words)
    watch = "--watch" in words
    folders = [word for word in words if word != "--watch"]
    if len(folders) != 1 or folders[0].startswith("-") or (port is not None and not watch):
        raise UserError("drzero report RUN_DIR [--watch [--port N]]: name one folder of a run (run.dir)")
    folder = Path(os.path.abspath(folders[0]))
    if not watch:
        print(write_report(folder))
        return
    from drzero.runs.report.watch import serve_report

    with suppress(NotARun):  # it may come
        folder = RunFolder(folder).folder
    try:
        serve_report(folder, port or 0)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}: leave it out for a free one") from error


def _take_port(words: list[str]) -> int | None:
    if "--port" not in words:
        return None
    place = words.index("--port")
    given = words[place + 1] if place + 1 < len(words) else ""
    if not given.isdecimal() or not 0 <= int(given) < 65536:
        raise UserError(
            f"--port {given!r} is no port: give a number below 65536, or leave it out for a free one"
        )
    del words[place : place + 2]
    return int(given)
