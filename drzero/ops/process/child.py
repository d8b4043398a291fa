"""One supervised child process: started under a keeper, its output teed, its end explained, its tree ended.

    child = Child(Command(name="trainer", command=("python", "-m", …), log_path=logs / "trainer.log"))
    while child.poll() is None: …
    child.stop()

The keeper (`drzero.ops.process.keeper`) ends the process tree. Should it be killed itself, descendants are
found by `DRZERO_RUN_ID`, a fresh id in their environment. The id cannot replace the keeper, since a process
that sets its own title (Ray's Python workers do) overwrites the environment that the system shows.
"""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import cast

import psutil

from drzero.ops.console import say
from drzero.ops.errors import RunFailed
from drzero.ops.process import keeper
from drzero.ops.process.logs import LogTee

RUN_ID_VARIABLE = "DRZERO_RUN_ID"
COMPONENT_VARIABLE = "DRZERO_COMPONENT"
"""The name of a command, in the environment of its keeper: others find a run's components by it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run: `env` is added to this process's environment, output goes to `log_path` (appended)."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    relays: bool = False
    """Whether all of its output is for the console too: it is a command of ours, which prints little."""


class ChildError(RunFailed):
    """A child process is at fault; the message ends with its first error, its last lines and its log."""

    def __init__(self, message: str, failed: "Child") -> None:
        self.summary = message
        self.name = failed.spec.name
        self.first_error = failed.first_error
        self.log_path = failed.spec.log_path
        self.tail = list(failed.tail)[-15:]
        lines = [message]
        if self.first_error:
            lines.append(f"first error: {self.first_error}")
        if self.tail:
            lines += ["last lines:", *(f"  {line}" for line in self.tail)]
        super().__init__("\n".join([*lines, f"log: {self.log_path}"]))


class Child:
    """A running command; start it from a thread that outlives it (see `drzero.ops.process.keeper`)."""

    def __init__(self, spec: Command, grace_s: float = 10.0) -> None:
        """Start `spec`; on a stop it has `grace_s` seconds between SIGTERM and SIGKILL."""
        self.spec = spec
        self.run_id = uuid.uuid4().hex
        self._grace_s = grace_s
        keep = (sys.executable, "-P", keeper.__file__, str(os.getpid()), str(grace_s))
        marks = {RUN_ID_VARIABLE: self.run_id, COMPONENT_VARIABLE: spec.name}
        self._keeper = subprocess.Popen(
            [*keep, *spec.command],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env, **marks},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the supervisor, which stops all parts in order
        )
        output = cast(BufferedReader, self._keeper.stdout)
        self._tee = LogTee(spec.name, output, spec.log_path, relays=spec.relays)
        self.log_offset = self._tee.offset
        """Where its output begins in its log."""
        self.tail = self._tee.tail
        """The last lines of output, oldest first."""

    @property
    def pid(self) -> int:
        """The keeper's pid: the command and all its descendants are below it."""
        return self._keeper.pid

    @property
    def first_error(self) -> str | None:
        """The first line of output that looks like an error."""
        return self._tee.first_error

    def poll(self) -> int | None:
        """Return None while it runs, then the exit code (negative: the signal that ended it)."""
        code = self._keeper.poll()
        if code is not None:
            # For the last lines of a report; another process may keep the pipe open.
            self._tee.join(5)
        return code

    def stop(self) -> None:
        """End the whole tree, by SIGKILL if necessary, and wait for it; does nothing when it has ended."""
        self._tee.is_stopping = True
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)
            try:
                self._keeper.wait(self._grace_s + 5)  # for the keeper itself
            except subprocess.TimeoutExpired:
                say(self.spec.name, "did not end in time; killing it")
                self._keeper.kill()
                self._keeper.wait()
        for process in marked_processes(self.run_id):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._tee.join(5)


def marked_processes(value: str, variable: str = RUN_ID_VARIABLE) -> list[psutil.Process]:
    """Return the processes of this machine whose environment at their start carried `variable=value`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def components_of(supervisor: int) -> dict[str, int]:
    """The keepers' pids of the commands that the process `supervisor` runs, by the commands' names.

    Raises psutil.NoSuchProcess when it has ended, and psutil.AccessDenied when it is another user's.
    """
    found = {}
    for process in psutil.Process(supervisor).children():
        with suppress(psutil.NoSuchProcess):
            if keeper.__file__ in process.cmdline():
                found[process.environ().get(COMPONENT_VARIABLE, f"pid {process.pid}")] = process.pid
    return found


def describe_exit(code: int) -> str:
    """How a process ended, in words; `code` as in `Popen.returncode`."""
    signum = -code if code < 0 else code - 128  # shells report a signal as 128 + its number
    try:
        name = signal.Signals(signum).name
    except ValueError:
        return f"exit code {code}"
    hint = ", often for lack of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}" if code < 0 else f"exit code {code} (a child was killed by {name}{hint})"
