"""One supervised child process, whose keeper (`drzero.ops.process.keeper`) ends its process tree.

After a killed keeper, `stop` finds descendants by `DRZERO_RUN_ID`, unless they set a title, as Ray's do.
"""

import os
import signal
import subprocess
import sys
import time
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
from drzero.ops.notices import shortened
from drzero.ops.process import keeper
from drzero.ops.process.logs import LogTee

RUN_ID_VARIABLE = "DRZERO_RUN_ID"
_OUTPUT = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:replace"}  # as `LogTee` reads it
_LEFTOVERS_END_S = 45.0  # a killed stage may take 30 s to end its children, its keeper a few more
COMPONENT_VARIABLE = "DRZERO_COMPONENT"  # a command's name in its keeper's environment


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run. `env` extends this process's environment, output is appended to `log_path`."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    relays: bool = False  # whether the console shows all output, for commands of ours that print little
    startup_signs: Mapping[str, str] = field(default_factory=dict)
    """The steps of its start, each by the text in its output that announces it."""


class ChildError(RunFailed):
    """A child process failed. The message ends with its first error, its last lines and its log."""

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
            lines += ["last lines:", *(f"  {shortened(line)}" for line in self.tail)]
        super().__init__("\n".join([*lines, f"log: {self.log_path}"]))


class Child:
    """A running command. Start it from a thread that outlives it (see `drzero.ops.process.keeper`)."""

    def __init__(self, spec: Command, grace_s: float = 10.0) -> None:
        """Start `spec`. `stop` waits `grace_s` seconds between SIGTERM and SIGKILL."""
        self.spec = spec
        self.run_id = uuid.uuid4().hex
        self._grace_s = grace_s
        keep = (sys.executable, "-P", keeper.__file__, str(os.getpid()), str(grace_s))
        marks = {RUN_ID_VARIABLE: self.run_id, COMPONENT_VARIABLE: spec.name}
        self._keeper = subprocess.Popen(
            [*keep, *spec.command],
            env={**os.environ, **_OUTPUT, **spec.env, **marks},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to the supervisor, which stops all parts in order
        )
        output = cast(BufferedReader, self._keeper.stdout)
        self._tee = LogTee(spec.name, output, spec.log_path, relays=spec.relays, signs=spec.startup_signs)
        self.log_offset = self._tee.offset  # where this child's output begins in the log
        self.tail = self._tee.tail

    @property
    def pid(self) -> int:
        """The keeper's pid, the root of the process tree."""
        return self._keeper.pid

    @property
    def first_error(self) -> str | None:
        """The first output line that looks like an error."""
        return self._tee.first_error

    def poll(self) -> int | None:
        """Return None while it runs, then the exit code (negative for a signal)."""
        code = self._keeper.poll()
        if code is not None:
            # Wait for the last lines, but not for ever: another process may keep the pipe open.
            self._tee.join(5)
        return code

    def stop(self) -> None:
        """End the whole tree, by SIGKILL if necessary, and wait for it. Does nothing if it has ended."""
        self._tee.is_stopping = True
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)
            try:
                self._keeper.wait(self._grace_s + 5)  # the keeper needs a moment more
            except subprocess.TimeoutExpired:
                say(self.spec.name, "did not end in time; killing it")
                self._keeper.kill()
                self._keeper.wait()
        for process in marked_processes(self.run_id):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._tee.join(5)


def marked_processes(value: str, variable: str = RUN_ID_VARIABLE) -> list[psutil.Process]:
    """Return this machine's processes that started with `variable=value` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def end_leftovers(name: str, variable: str, value: str) -> None:
    """Wait for a killed run's processes marked `variable=value`, then kill the rest. Log both."""
    if left := _others(variable, value):
        say(name, f"{len(left)} processes of a killed run are still ending; waiting for them")
    deadline = time.monotonic() + _LEFTOVERS_END_S
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = _others(variable, value)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            say(name, f"killing a leftover: pid {process.pid} {' '.join(process.cmdline())[:120]}")
            process.kill()
    psutil.wait_procs(left, timeout=_LEFTOVERS_END_S)


def _others(variable: str, value: str) -> list[psutil.Process]:
    """The marked processes except this one and its parents. A zombie has no environment."""
    own = [psutil.Process(), *psutil.Process().parents()]
    return [process for process in marked_processes(value, variable) if process not in own]


def components_of(supervisor: int) -> dict[str, int]:
    """Return the pids of a supervisor's keepers, by component. Raises psutil.Error if unreadable."""
    found = {}
    for process in psutil.Process(supervisor).children():
        with suppress(psutil.NoSuchProcess):
            if keeper.__file__ in process.cmdline():
                found[process.environ().get(COMPONENT_VARIABLE, f"pid {process.pid}")] = process.pid
    return found


def describe_exit(code: int) -> str:
    """Say how a process ended. `code` is as in `Popen.returncode`."""
    signum = -code if code < 0 else code - 128  # shells report a signal as 128 + its number
    try:
        name = signal.Signals(signum).name
    except ValueError:
        return f"exit code {code}"
    hint = ", often for lack of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}" if code < 0 else f"exit code {code} (a child was killed by {name}{hint})"
