"""Replacing a folder as a whole: written beside its place, made durable, then renamed into it.

A process that dies while writing leaves only a hidden sibling, `.NAME.building`, which the next build
empties (`staging_folder`) or goes on with (`work_folder`). One that dies between the two renames of
`publish` leaves the old folder as `.NAME.previous`, which `recover` puts back.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from search.store import StoreError


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.{role}")


def recover(target: Path) -> None:
    """Put back the folder that an interrupted `publish` had moved aside; remove it where it is replaced.

    An empty folder replaces nothing: somebody has made it since.
    """
    previous = _sibling(target, "previous")
    if previous.exists() and not (target.exists() and any(target.iterdir())):
        previous.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Yield the folder beside `target` to build in, with what a build that was cut off left there.

    It stays when the body ends, unless the body removes or publishes it. Raises StoreError if another build
    has it.
    """
    folder = _sibling(target, "building")
    handle = _lock(folder)
    try:
        yield folder
    finally:
        os.close(handle)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, removed if the body fails.

    Raises StoreError if another build has it.
    """
    with work_folder(target) as folder:
        try:
            for leftover in folder.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _lock(folder: Path) -> int:
    """Make the folder and lock it; return the handle whose closing unlocks it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            target = folder.with_name(folder.name.removeprefix(".").removesuffix(".building"))
            _lock_handle(handle, str(target))
            # The last holder may have removed or renamed it between the two calls above.
            if folder.exists() and folder.stat().st_ino == os.fstat(handle).st_ino:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def sole_writer(what: str) -> Iterator[None]:
    """Hold a server's collection, which has no folder to lock, against other builds of this user here.

    Raises StoreError if another build has it.
    """
    name = f"drzero-index-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        _lock_handle(file.fileno(), what)
        yield


def _lock_handle(handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreError(f"another build is writing {what} just now: wait for it or stop it") from None


def publish(folder: Path, target: Path) -> None:
    """Make `folder` durable and let it take the place of `target`."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    previous = _sibling(target, "previous")
    shutil.rmtree(previous, ignore_errors=True)
    if target.exists():
        target.rename(previous)
    folder.rename(target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
