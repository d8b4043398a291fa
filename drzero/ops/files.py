"""Files and folders that are written completely or not at all, even across a crash.

    atomic_write(path, text)                        # readers see the old content or the new, never a part
    with atomic_path(path) as temporary: ...        # the same for a writer that wants a path
    with staging_folder(target) as folder: ...      # build a folder next to its place, then
        publish(folder, target)                     # make it durable and let it take that place

A file is written under a temporary name in its own folder, since a rename is atomic only within one file
system; then it is synced, renamed, and its folder synced, without which a power cut can undo the rename.

A process that dies while writing a folder leaves only a hidden sibling, `.NAME.building`, which the next
build empties (`staging_folder`) or resumes (`work_folder`). One that dies between the two renames of
`publish` leaves the old folder as `.NAME.previous`, which `recover` puts back.
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
    """Open a file that a user named, to read its bytes; raises OSError for what is no file.

    A FIFO would wait for a writer, and a device such as /dev/zero never ends.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which a FIFO's opening does not wait for
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` when the block ends well, else remove it.

    The folder is made if missing. The file's mode follows the umask (tempfile's would be private, 0600).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace the file at `path` with `data` (text as UTF-8); its folder must exist.

    On any failure the old content stays; an OSError names `path`.
    """
    try:
        path.parent.stat()
        with atomic_path(path) as temporary:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:  # a failed write names no file, or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` atomically, one JSON object a line (UTF-8, keys in the order given)."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.{role}")


def recover(target: Path) -> None:
    """Put back the folder that an interrupted `publish` had moved aside; remove it where it is replaced.

    An empty folder does not replace it: it was created since.
    """
    previous = _sibling(target, "previous")
    if previous.exists() and not (target.exists() and any(target.iterdir())):
        previous.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Yield the build folder next to `target`, with what an interrupted build left in it.

    It stays when the body ends, unless the body removes or publishes it. Raises AlreadyWriting if another
    build has locked it.
    """
    folder = _sibling(target, "building")
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(folder) as handle:
            _lock(handle, str(target))
            # Its last holder may have removed or renamed it between the two calls above.
            if folder.exists() and folder.stat().st_ino == os.fstat(handle).st_ino:
                yield folder
                return


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target`, removed if the body fails.

    Raises AlreadyWriting if another build has locked it.
    """
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
    """Lock a Chroma server's collection, which has no folder, against other builds of this user here.

    Raises AlreadyWriting if another build has locked it.
    """
    name = f"drzero-index-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        _lock(file.fileno(), what)
        yield


def _lock(handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyWriting(f"another build is writing {what} just now: wait for it or stop it") from None


def publish(folder: Path, target: Path) -> None:
    """Make `folder` durable and put it in the place of `target`."""
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
