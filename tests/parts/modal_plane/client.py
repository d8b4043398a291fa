"""Runs the `modal` command line, as installed, against a control plane, with nothing but what it needs.

The interpreter is one that a user has who has installed what docs/modal.md names, so a launcher that imports
more fails here.
"""

import os
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

from packaging.requirements import Requirement

FOREIGN = ("http_proxy", "https_proxy", "all_proxy")
INSTALLED = ("modal", "pyyaml", "python-dotenv")
"""What a client installs (docs/modal.md)."""


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    def succeeded(self) -> Self:
        """Fails, with what it printed, unless its exit code is 0."""
        assert self.code == 0, self.stdout[-6000:] + self.stderr
        return self


class Client:
    """A running `modal ARGUMENTS`. `output` is the path, without an ending, of files for what it prints."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        cwd: Path,
        environment: Mapping[str, str],
        output: Path,
        python: Path,
    ) -> None:
        self._arguments = arguments
        self._paths = output.with_suffix(".out"), output.with_suffix(".err")
        with self._paths[0].open("wb") as stdout, self._paths[1].open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", "modal", *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> Done:
        """Wait for its end. Kills it and raises TimeoutError, with what it printed, if it takes longer."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            self.kill()
            printed = self.stdout + self._paths[1].read_text()
            raise TimeoutError(f"modal {' '.join(self._arguments)}: {seconds:g} s\n{printed}") from error
        return Done(code, self.stdout, self._paths[1].read_text())

    def interrupt(self) -> None:
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
        if not name.startswith("MODAL_") and name != "PYTHONPATH" and name.lower() not in FOREIGN
    }
    return own | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"} | dict(extra)


def bare_python(folder: Path) -> None:
    """Make an environment in which only `INSTALLED` and its requirements can be imported."""
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    for name in _with_requirements(INSTALLED):
        found = distribution(name)
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(found.locate_file(part))))


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    """These distributions with everything they require here."""
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop().lower()) in known:
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            # Needed on another platform or version of Python alone.
            continue
        known.add(name)
        requirements = [Requirement(line) for line in lines]
        waiting += [
            one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return known
