"""Runs a command that may crash or hang in a separate process with a time limit.

    ended = run_isolated((sys.executable, "-m", "drzero.ops.resources.cuda"), 60.0)

A process that hangs in a driver and survives SIGKILL is left behind.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drzero.ops.process.child import describe_exit
from drzero.ops.records import parse_line

_KILLED_WITHIN_S = 5.0


@dataclass(frozen=True)
class Ended:
    """The result of a command. `fault` is None for exit code 0."""

    fault: str | None
    out: str

    def records(self) -> list[Any]:
        """Return the JSON objects that it printed, one per line."""
        found = [parse_line(line.encode()) for line in self.out.split("\n") if line.startswith("{")]
        return [record for record in found if record is not None]


def run_isolated(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command for at most `limit_s` seconds. `env` extends this process's environment."""
    # Files, not pipes: a survivor of the command would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {})},
            process_group=0,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_WITHIN_S)
        for file in (out, err):
            file.seek(0)
        printed, said = out.read().decode(errors="replace"), last_line(err.read())
    if code is None:
        return Ended(f"it hung: no result after {limit_s:.0f} s", printed)
    ended = said if code > 0 and said else f"{describe_exit(code)}{f': {said}' if said else ''}"
    return Ended(ended if code else None, printed)


def last_line(output: bytes) -> str:
    """Return the last non-empty line, up to 300 characters."""
    lines = [line for line in output.decode(errors="replace").split("\n") if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
