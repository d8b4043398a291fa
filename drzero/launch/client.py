"""Upload, download and logs: actions of the user's machine that need no container.

A repeated transfer skips files of the same size and time, so an interrupted one continues where it stopped.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import modal
from modal.types import FileEntry, FileEntryType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from drzero.launch.arguments import Words
from drzero.launch.errors import LaunchError
from drzero.launch.request import run_name
from drzero.launch.spend import CONTINUES
from drzero.launch.volumes import LAUNCHES

BATCH_BYTES = 512 * 2**20  # size of an upload batch, the most that a broken connection loses
_FOLLOW_S = 10.0  # Seconds between reads of a followed log. The container commits it at least once a minute.


def run_upload(words: Words, volume: modal.Volume) -> None:
    """`--action upload LOCAL [REMOTE]`, to the corpus volume."""
    if not 1 <= len(words.places) <= 2:
        raise LaunchError("--action upload LOCAL [REMOTE]: name what to upload, and where to")
    source = Path(words.places[0]).expanduser()
    target = words.places[1] if len(words.places) > 1 else _default_target(source)
    sent, present = upload(volume, source, target)
    print(f"{source} is at /corpus/{target.strip('/')}: {sent} files sent, {present} already present")


def _default_target(source: Path) -> str:
    if (source / "chroma.sqlite3").is_file():
        return "/chromadb"
    if (source / "index.faiss").is_file():
        return "/faiss"
    if (source / "config.json").is_file():
        return f"/models/{source.resolve().name}"
    return f"/{source.resolve().name}"


def run_download(words: Words, volume: modal.Volume) -> None:
    """`--action download REMOTE [LOCAL]`, from the checkpoints volume."""
    if not 1 <= len(words.places) <= 2:
        raise LaunchError(
            "--action download REMOTE [LOCAL]: name what to download, for example challenger_iter1/dumps; "
            "--action status lists the runs"
        )
    source = words.places[0].strip("/")
    target = Path(words.places[1] if len(words.places) > 1 else f"outputs/modal/{source}").expanduser()
    fetched, present = download(volume, source, target)
    print(f"{source} is at {target}: {fetched} files fetched, {present} already present")


def run_logs(words: Words, volume: modal.Volume) -> None:
    """`--action logs [RUN] [--stage S --iteration I] [--follow]`: a run's last committed console."""
    name = run_name(words)
    shown = 0
    while True:
        file = _read(volume, f"{LAUNCHES}/{name}/state.json")
        if file is None:
            raise LaunchError(f"logs: no launch of {name!r} is on the volume; --action status lists them")
        text = _read(volume, f"{LAUNCHES}/{name}/console.log") or b""
        sys.stdout.write(text[shown:].decode("utf-8", errors="replace"))
        sys.stdout.flush()
        shown = len(text)
        state = json.loads(file)
        outcome = state["outcome"]
        if not words.follow or (outcome is not None and outcome["state"] != CONTINUES):
            if outcome is None:
                print(
                    f"[launch] not ended at its last commit; live: modal app logs {state['app'] or 'APP_ID'}"
                )
            return
        time.sleep(_FOLLOW_S)


def _read(volume: modal.Volume, path: str) -> bytes | None:
    try:
        return b"".join(volume.read_file(path))
    except (modal.exception.NotFoundError, FileNotFoundError):
        return None


# Transfers --------------------------------------------------------------------------------------------------


def upload(volume: modal.Volume, source: Path, target: str) -> tuple[int, int]:
    """Send a file or folder. Returns how many files were sent and were already present."""
    if source.is_file():
        files = [(source, f"{target}{source.name}" if target.endswith("/") else target)]
    else:
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        files = [(path, str(PurePosixPath(target) / path.relative_to(source).as_posix())) for path in paths]
    if not files:
        problem = "is an empty folder" if source.is_dir() else "does not exist"
        raise LaunchError(f"upload {source}: it {problem}")
    present = {entry.path: entry for entry in _remote_files(volume, target)}

    def is_sent(path: Path, remote: str) -> bool:
        entry, stat = present.get(remote.lstrip("/")), path.stat()
        return entry is not None and entry.size == stat.st_size and entry.mtime >= int(stat.st_mtime)

    wanted = [(path, remote) for path, remote in files if not is_sent(path, remote)]
    with _progress() as progress:
        bar = progress.add_task(f"upload {source.name}", total=sum(path.stat().st_size for path, _ in wanted))
        for batch in _batches(wanted):
            with volume.batch_upload(force=True) as sending:
                for path, remote in batch:
                    sending.put_file(str(path), remote)
            progress.advance(bar, sum(path.stat().st_size for path, _ in batch))
    return len(wanted), len(files) - len(wanted)


def download(volume: modal.Volume, source: str, target: Path) -> tuple[int, int]:
    """Returns the numbers of files fetched and present. Raises LaunchError for a missing or outside path."""
    entries = _remote_files(volume, source)
    if not entries:
        raise LaunchError(
            f"download {source}: the volume has no such file or folder; --action status lists runs"
        )
    root = PurePosixPath(source.strip("/"))
    places = [(entry, target / _below(root, entry.path)) for entry in entries]
    here = {path: path.stat() for _, path in places if path.is_file()}
    wanted = [
        (entry, path)
        for entry, path in places
        if path not in here
        or (here[path].st_size, int(here[path].st_mtime)) != (entry.size, int(entry.mtime))
    ]
    with _progress() as progress:
        bar = progress.add_task(f"download {root}", total=sum(entry.size for entry, _ in wanted))
        for entry, path in wanted:
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
            progress.advance(bar, entry.size)
    return len(wanted), len(entries) - len(wanted)


def _below(root: PurePosixPath, path: str) -> PurePosixPath:
    """Raises LaunchError for a path that leads out of `root`."""
    listed = PurePosixPath(path.lstrip("/"))
    if ".." in listed.parts or not listed.is_relative_to(root):
        raise LaunchError(
            f"download {root}: the volume lists {path!r}, which is not below it: nothing fetched"
        )
    return listed.relative_to(root)


def _remote_files(volume: modal.Volume, path: str) -> list[FileEntry]:
    try:
        entries = volume.listdir(path, recursive=True)
    except (modal.exception.NotFoundError, FileNotFoundError):
        return []
    return [entry for entry in entries if entry.type is FileEntryType.FILE]


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
