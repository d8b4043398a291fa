"""Files between this machine and a volume, with progress, and without sending twice what is there.

    upload(volume, Path("papers.jsonl"), "/papers.jsonl")
    download(volume, "/challenger_iter1/dumps", Path("dumps"))

A file counts as there when its size is the same and, for an upload, it is not newer than the volume's copy,
for a download, of the same second; so a transfer that was cut off goes on where it was, and the number of a
run's last step, which keeps its size, is fetched again. Downloads are written beside their names first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import modal
from modal.types import FileEntry, FileEntryType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from launch.errors import LaunchError

BATCH_BYTES = 512 * 2**20
"""Of one upload batch: what a broken connection costs at most."""


def upload(volume: modal.Volume, source: Path, target: str) -> tuple[int, int]:
    """Send a file or folder; returns how many files were sent and how many were there already.

    Raises LaunchError for a source that is missing or empty.
    """
    files = _local_files(source, target)
    there = {entry.path: entry for entry in _remote_files(volume, target)}
    wanted = [(path, remote) for path, remote in files if not _is_there(path, there.get(remote.lstrip("/")))]
    with _progress() as progress:
        bar = progress.add_task(f"upload {source.name}", total=sum(path.stat().st_size for path, _ in wanted))
        for batch in _batches(wanted):
            with volume.batch_upload(force=True) as sending:
                for path, remote in batch:
                    sending.put_file(str(path), remote)
            progress.advance(bar, sum(path.stat().st_size for path, _ in batch))
    return len(wanted), len(files) - len(wanted)


def download(volume: modal.Volume, source: str, target: Path) -> tuple[int, int]:
    """Fetch a file or folder; returns how many files were fetched and how many were there already.

    Raises LaunchError for a source that the volume does not have.
    """
    entries = _remote_files(volume, source)
    if not entries:
        raise LaunchError(
            f"download {source}: the volume has no such file or folder; --action status lists runs"
        )
    root = PurePosixPath(source.strip("/"))
    places = [(entry, target / PurePosixPath(entry.path).relative_to(root)) for entry in entries]
    wanted = [(entry, path) for entry, path in places if not _is_fetched(path, entry)]
    with _progress() as progress:
        bar = progress.add_task(f"download {root}", total=sum(entry.size for entry, _ in wanted))
        for entry, path in wanted:
            _fetch(volume, entry, path)
            progress.advance(bar, entry.size)
    return len(wanted), len(entries) - len(wanted)


def _fetch(volume: modal.Volume, entry: FileEntry, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            volume.read_file_into_fileobj(entry.path, file)
            file.flush()
            os.fsync(file.fileno())
        os.utime(partial, (entry.mtime, entry.mtime))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _local_files(source: Path, target: str) -> list[tuple[Path, str]]:
    if source.is_file():
        remote = f"{target}{source.name}" if target.endswith("/") else target
        return [(source, remote)]
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if not files:
        what = "is an empty folder" if source.is_dir() else "does not exist"
        raise LaunchError(f"upload {source}: it {what}")
    return [(path, str(PurePosixPath(target) / path.relative_to(source).as_posix())) for path in files]


def _remote_files(volume: modal.Volume, path: str) -> list[FileEntry]:
    try:
        entries = volume.listdir(path, recursive=True)
    except (modal.exception.NotFoundError, FileNotFoundError):
        return []
    return [entry for entry in entries if entry.type is FileEntryType.FILE]


def _is_there(path: Path, entry: FileEntry | None) -> bool:
    stat = path.stat()
    return entry is not None and entry.size == stat.st_size and entry.mtime >= int(stat.st_mtime)


def _is_fetched(path: Path, entry: FileEntry) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, int(stat.st_mtime)) == (entry.size, int(entry.mtime))


def _batches(files: list[tuple[Path, str]]) -> Iterator[list[tuple[Path, str]]]:
    batch: list[tuple[Path, str]] = []
    size = 0
    for path, remote in files:
        if batch and size + path.stat().st_size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((path, remote))
        size += path.stat().st_size
    if batch:
        yield batch


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
