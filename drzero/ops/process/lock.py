"""A lock that the kernel releases when its holder ends: `with HeldLock(folder / "lock"): …`"""

import fcntl
import os
from pathlib import Path
from typing import Self

from drzero.ops.errors import UserError


class AlreadyRunning(UserError):
    """Another process holds the lock."""


class HeldLock:
    """An exclusive lock on `path` for a `with` block. Raises `AlreadyRunning` if it is held."""

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
            text = f"is in use by process {holder}: wait for it, or end it (kill {holder})"
            raise AlreadyRunning(f"{self._path.parent} {text}") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        # Removing the file would let two processes lock two files.
        os.close(self._descriptor)


def lock_is_held(path: Path) -> bool:
    """Whether some process holds the lock now."""
    if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def lock_holder(path: Path) -> int | None:
    """Return the holder's pid, or None if nobody holds the lock."""
    if not lock_is_held(path):
        return None
    text = path.read_text()
    return int(text) if text.isdigit() else None
