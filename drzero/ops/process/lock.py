"""One holder at a time: a lock that a killed process cannot leave behind.

    with HeldLock(folder / "lock"):
        …

The kernel releases a file lock when its holder ends, however it ends, so there is no stale lock to remove.
The file holds the holder's pid, for the error message of the next one that tries.
"""

import fcntl
import os
from pathlib import Path
from typing import Self

from drzero.ops.errors import UserError


class AlreadyRunning(UserError):
    """Another process holds the lock."""


class HeldLock:
    """Context manager around an exclusive lock on `path`; raises `AlreadyRunning` at once when it is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode() or "unknown"
            os.close(self._descriptor)
            text = f"is in use by process {holder}: wait for it, or end it first (kill {holder})"
            raise AlreadyRunning(f"{self._path.parent} {text}") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        # The file stays, since removing it would let two processes lock two files.
        os.close(self._descriptor)


def lock_is_held(path: Path) -> bool:
    """Whether some process holds the lock now."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def lock_holder(path: Path) -> int | None:
    """The pid that the lock's holder has written into it; None while nobody holds it."""
    if not lock_is_held(path):
        return None
    text = path.read_text()
    return int(text) if text.isdigit() else None
