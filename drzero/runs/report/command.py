"""`drzero report RUN_DIR`: a run as one HTML file, or as a page that follows it.

    drzero report outputs/checkpoints/demo              writes report.html there; it opens in any browser
    drzero report outputs/checkpoints/evolve            the loop: scores by iteration, what gates refused
    drzero report outputs/checkpoints/demo --watch      serves it on 127.0.0.1 until Ctrl-C, and refreshes it
    drzero report outputs/checkpoints/demo --watch --port 8042

Stages and the loop write the file themselves when they end; for a killed run this command does. The file
loads nothing from anywhere. Its links lead to the run's own files, so move it together with them.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drzero.ops.errors import UserError
from drzero.runs.report.write import write_report
from drzero.runs.run_folder import NotARun, RunFolder


class BadArguments(UserError):
    """The command line of `drzero report` cannot be used."""


def run_report(arguments: Sequence[str]) -> None:
    """Write the report and print its path, or serve it; raises NotARun if there is no run to write of."""
    words = list(arguments)
    port = _take_port(words)
    watch = "--watch" in words
    folders = [word for word in words if word != "--watch"]
    if len(folders) != 1 or folders[0].startswith("-") or (port is not None and not watch):
        raise BadArguments("drzero report RUN_DIR [--watch [--port N]]: name one folder of a run (run.dir)")
    folder = Path(folders[0]).resolve()
    if not watch:
        print(write_report(folder))
        return
    from drzero.runs.report.watch import serve_report

    with suppress(NotARun):  # it may come
        folder = RunFolder(folder).folder
    try:
        serve_report(folder, port or 0)
    except OSError as error:
        raise BadArguments(f"--port {port}: {error.strerror}: leave it out for a free one") from error


def _take_port(words: list[str]) -> int | None:
    """The number after `--port`, which is removed; None without one."""
    if "--port" not in words:
        return None
    place = words.index("--port")
    given = words[place + 1] if place + 1 < len(words) else ""
    if not given.isdecimal() or not 0 <= int(given) < 65536:
        raise BadArguments(
            f"--port {given!r} is no port: give a number below 65536, or leave it out for a free one"
        )
    del words[place : place + 2]
    return int(given)
