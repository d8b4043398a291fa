"""Clean up after a killed run: processes, found by a mark in their environment, and temporary files.

    end_leftovers("evolve", "DRZERO_LOOP", folder)

The children of a killed supervisor end within seconds (`drzero.ops.process.keeper`). This is for those
seconds, and for what is left when the keepers themselves were killed.
"""

import time
from contextlib import suppress
from pathlib import Path

import psutil

from drzero.ops.console import say
from drzero.ops.process.child import marked_processes

_GRACE_S = 45.0
"""A killed loop's stage has 30 s to end its trainer and services, and its keeper a few more to enforce it."""


def end_leftovers(name: str, variable: str, value: str) -> None:
    """Wait for processes marked `variable=value` to end by themselves, then kill the rest; log both."""
    if left := _others(variable, value):
        say(name, f"{len(left)} processes of a killed run are still ending; waiting for them")
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = _others(variable, value)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            say(name, f"killing a leftover: pid {process.pid} {' '.join(process.cmdline())[:120]}")
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE_S)


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files of killed writers; call it only while holding the folder's lock."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _others(variable: str, value: str) -> list[psutil.Process]:
    """The marked processes that still run (a zombie has no environment), without this one and its parents."""
    own = [psutil.Process(), *psutil.Process().parents()]
    return [process for process in marked_processes(value, variable) if process not in own]
