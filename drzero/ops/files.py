"""Files and folders that are written completely or not at all, even across a crash.

with staging_folder(target) as folder: ...      # a killed writer leaves `.NAME.building`
    publish(folder, target)                     # or `.NAME.previous`, which `recover` puts back
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from drzero.ops.errors import UserError


class AlreadyWriting(UserError):
    """Another process is writing the same folder or collection."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes. Raises OSError for a FIFO or device, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would block
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files of killed writers. Hold the folder's lock when you call it."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace the file at `path`, or keep the old content and raise an OSError that names it."""
    try:
        path.parent.stat()
        with atomic_path(path) as temporary:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:  # it names no file, or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` atomically, one JSON object per line (UTF-8)."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.{role}")


def recover(target: Path) -> None:
    """Undo or finish an interrupted `publish`: restore the old folder unless a new one has replaced it."""
    previous = _sibling(target, "previous")
    # An empty folder is not a replacement: somebody created it since.
    if previous.exists() and not (target.exists() and any(target.iterdir())):
        previous.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Yield the build folder next to `target`, with leftovers. Raises AlreadyWriting if it is in use."""
    folder = _sibling(target, "building")
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(folder) as handle:
            _lock(handle, str(target))
            # The last holder may have removed or renamed the folder before we locked it.
            if folder.exists() and folder.stat().st_ino == os.fstat(handle).st_ino:
                yield folder
                return


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty build folder, removed if the block fails. Raises AlreadyWriting if it is in use."""
    with work_folder(target) as folder:
        try:
            for leftover in folder.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def sole_writer(what: str) -> Iterator[None]:
    """Lock a Chroma server's collection against other builds here, or raise AlreadyWriting."""
    name = f"drzero-index-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        _lock(file.fileno(), what)
        yield


def _lock(handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyWriting(f"another build is writing {what}: wait for it or stop it") from None


def publish(folder: Path, target: Path) -> None:
    """Make `folder` durable and move it to `target`."""
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
    with _opened(path) as handle:
        os.fsync(handle)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
