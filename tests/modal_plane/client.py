"""Runs the `modal` command line, as installed, against a control plane."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOREIGN = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


class Client:
    """A command that runs.

    Args:
        arguments: What follows `modal` on the command line.
        cwd: Where it runs.
        environment: All of its environment.
        output: Path without ending for the files that get what it prints.
    """

    def __init__(
        self, arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], output: Path
    ) -> None:
        self._arguments = arguments
        self._paths = output.with_suffix(".out"), output.with_suffix(".err")
        with self._paths[0].open("wb") as stdout, self._paths[1].open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "modal", *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._paths[0].read_text()

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> Done:
        """Wait for its end.

        Raises:
            TimeoutError: It has not ended; it is killed then. The error has what it printed.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            self.kill()
            printed = self.stdout + self._paths[1].read_text()
            raise TimeoutError(f"modal {' '.join(self._arguments)}: {seconds:g} s\n{printed}") from error
        return Done(code, self.stdout, self._paths[1].read_text())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it without a chance to close its connections, as when a laptop goes to sleep."""
        self._process.kill()
        self._process.wait()


def client_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would lead the client elsewhere, and with `extra`."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MODAL_") and name.lower() not in FOREIGN
    }
    return own | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"} | dict(extra)
