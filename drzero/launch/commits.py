"""Commits of the volumes while a stage runs: in a thread, one volume at a time, failures counted and logged.

Modal reloads a volume after a commit, which fails while the stage has files of it open. Such a commit has
persisted although it raises, so a number in a small file is read back. The console is copied from the local
disk before a commit, so the launcher itself holds no file open.
"""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from drzero.launch.errors import LaunchError
from drzero.launch.volumes import LAUNCHES, place
from drzero.ops.console import say
from drzero.ops.files import atomic_write

RUNNING = ("checkpoints", "corpus")
"""Committed while the stage runs, in this order: checkpoints must not wait for another volume."""
TRIES = 3  # attempts of the last commit, which must not get lost
RETRY_S = 5.0


class CommittedVolume(Protocol):
    """The part of `modal.Volume` used here."""

    def commit(self) -> None:
        """Persist what this container wrote."""

    def read_file(self, path: str) -> Iterator[bytes]:
        """The persisted content of a file."""


class Commits:
    """The commits of one call. `folder` is on the checkpoints volume, `console` on the local disk."""

    def __init__(self, volumes: Mapping[str, CommittedVolume], folder: Path, console: Path) -> None:
        self._volumes = volumes
        self._folder, self._console = folder, console
        self._copied = 0
        self._wanted = threading.Condition()
        self._waiting, self._ended = False, False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.failed = 0

    def request(self) -> None:
        """Commit soon, in the thread. A request during a commit is served after it."""
        with self._wanted:
            self._waiting = True
            self._wanted.notify()

    def close(self) -> None:
        """Wait for the current commit and end the thread."""
        with self._wanted:
            self._ended = True
            self._wanted.notify()
        self._thread.join()

    def finish(self) -> None:
        """Commit all volumes now, with retries. Raises LaunchError if one with results fails."""
        self.close()
        failed = self.commit(tuple(self._volumes))
        for _ in range(TRIES - 1):
            if not failed:
                return
            time.sleep(RETRY_S)
            failed = self.commit(tuple(failed))
        if lost := [kind for kind in RUNNING if kind in failed]:
            raise LaunchError(
                f"the {' and the '.join(lost)} volume could not be committed, so what was written since its "
                f"last commit is lost: {failed[lost[0]]}. Launch it again to resume from there"
            )

    def commit(self, kinds: tuple[str, ...] = RUNNING) -> dict[str, str]:
        """Commit these volumes one after the other. Returns the errors by volume."""
        self._copy_console()
        failed = {}
        for kind in (kind for kind in kinds if kind in self._volumes):
            if (error := self._commit(kind)) is not None:
                failed[kind] = error
                self.failed += 1
                say("launch", f"the {kind} volume could not be committed ({self.failed} in all): {error}")
        return failed

    def _commit(self, kind: str) -> str | None:
        mark = f"{LAUNCHES}/{self._folder.name}/committed"
        number = uuid.uuid4().hex
        try:
            file = place(kind) / mark
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, number)
            self._volumes[kind].commit()
        # Whatever Modal raises must neither end the stage nor skip the next volume.
        except Exception as error:
            return None if self._persisted(kind, mark, number) else f"{error}"
        return None

    def _persisted(self, kind: str, mark: str, number: str) -> bool:
        try:
            return b"".join(self._volumes[kind].read_file(mark)).decode() == number
        # If the volume cannot be read, it counts as not committed.
        except Exception:
            return False

    def _copy_console(self) -> None:
        if not self._console.is_file():
            return
        with self._console.open("rb") as source:
            source.seek(self._copied)
            new = source.read()
        with (self._folder / "console.log").open("ab") as target:
            target.write(new)
        self._copied += len(new)

    def _work(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                self._waiting = False
            self.commit()
