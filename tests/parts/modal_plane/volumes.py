"""Volumes: the committed state, and a view for each container.

Clients see the committed folder. A container's folder is a copy from its start: it sees other commits only
after a reload. A commit applies its changes file by file, so the last commit of a file counts. A killed
container's uncommitted changes are lost.

As at Modal, a reload is refused while a process has a file of the volume open or works in it. A commit
reloads afterwards, so with open files it persists and raises. A slot (`Containers`) has one path, which its
next container gets too. Slot 0 is `Volume.folder`.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.blobs import BLOCK, Blobs
from modal_plane.servicer import CALLER, Reply

if TYPE_CHECKING:
    from modal_plane.containers import Containers
    from modal_plane.state import State

Tree = dict[str, tuple[object, ...]]
"""What tells two states of a folder apart, by relative path."""


@dataclass(frozen=True)
class Commit:
    function: str
    call_id: str
    at_exit: bool
    """Whether it is the one that Modal's entrypoint makes when the container ends."""


@dataclass
class View:
    folder: Path
    base: Tree = field(default_factory=dict)
    """The folder as it was last the same as a committed state."""


class Volume:
    def __init__(self, name: str, volume_id: str, folder: Path) -> None:
        self.name = name
        self.id = volume_id
        self._slots = folder / name / "mounted"
        self._committed = folder / name / "committed"
        self._committed.mkdir(parents=True)
        self.folder.mkdir(parents=True)
        self.commits: list[Commit] = []
        self.views: dict[str, View] = {}
        self.open = threading.Event()
        """Cleared by a test, commits wait."""
        self.open.set()
        self.waiting = 0
        """How many commits do."""

    @property
    def folder(self) -> Path:
        """Where the container in slot 0 has the volume, or the last one there had it."""
        return self._slots / "0"

    def committed(self) -> Path:
        return self._committed

    def put(self, path: str, content: bytes) -> None:
        place = self.place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def mount(self, task_id: str, slot: int) -> Path:
        view = self.views[task_id] = View(self._slots / str(slot))
        view.folder.mkdir(parents=True, exist_ok=True)
        mirror(self._committed, view.folder)
        view.base = _tree(view.folder)
        return view.folder

    def commit(self, task_id: str) -> None:
        """Apply the container's changes since its view was last the committed state."""
        view = self.views[task_id]
        now = _tree(view.folder)
        changed = {path for path in now.keys() | view.base.keys() if now.get(path) != view.base.get(path)}
        mirror(view.folder, self._committed, changed)
        view.base = now

    def reload(self, task_id: str) -> None:
        """Bring the committed state into the container's view, next to its own changes."""
        view = self.views[task_id]
        if (held := _open_file(view.folder)) is not None:
            # Modal's words, which its client looks for.
            raise GRPCError(
                Status.FAILED_PRECONDITION, f"there are open files preventing the operation: {held}"
            )
        now, committed = _tree(view.folder), _tree(self._committed)
        same = {path for path in now.keys() | view.base.keys() if now.get(path) == view.base.get(path)}
        mirror(self._committed, view.folder, same | (committed.keys() - now.keys() - view.base.keys()))
        view.base = committed

    def place(self, path: str) -> Path:
        relative = PurePosixPath(path.lstrip("/"))
        if ".." in relative.parts:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{path!r} is not a path in a volume")
        return self._committed / relative

    def metadata(self) -> api_pb2.VolumeMetadata:
        return api_pb2.VolumeMetadata(version=api_pb2.VOLUME_FS_VERSION_V1, name=self.name)


def _open_file(folder: Path) -> str | None:
    """`PATH (process N)` of a file or working directory in the folder that another process has open."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        # A process that ends meanwhile, or another user's, has nothing open here.
        with contextlib.suppress(OSError):
            for link in (process / "cwd", *(process / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    target = link.readlink()
                    if target.is_relative_to(folder):
                        return f"{target.relative_to(folder)} (process {process.name})"
    return None


def _tree(folder: Path) -> Tree:
    """Size, time and mode by relative path, of all files that do not vanish meanwhile."""
    entries: Tree = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            kind = stat.S_IFMT(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                version: tuple[object, ...] = (kind, path.readlink())
            elif stat.S_ISREG(status.st_mode):
                version = (kind, status.st_size, status.st_mtime_ns, status.st_mode)
            else:
                version = (kind,)
            entries[path.relative_to(folder).as_posix()] = version
    return entries


def mirror(source: Path, target: Path, only: set[str] | None = None) -> None:
    """Make `target` the same as `source` (of `only`, these paths), touching only what differs."""
    wanted, present = _tree(source), _tree(target)
    if only is not None:
        wanted = {path: version for path, version in wanted.items() if path in only}
        present = {path: version for path, version in present.items() if path in only}
    for path in sorted(present, reverse=True):
        if path not in wanted or wanted[path][0] != present[path][0]:
            present.pop(path)
            if (target / path).is_dir() and not (target / path).is_symlink():
                # Its own files were removed before it; it stays if it has others.
                with contextlib.suppress(OSError):
                    (target / path).rmdir()
            else:
                (target / path).unlink(missing_ok=True)
    for path in sorted(wanted):
        if wanted[path] == present.get(path):
            continue
        if wanted[path][0] == stat.S_IFDIR:
            (target / path).mkdir(parents=True, exist_ok=True)
        elif wanted[path][0] in (stat.S_IFREG, stat.S_IFLNK):
            with contextlib.suppress(FileNotFoundError):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).unlink(missing_ok=True)
                shutil.copy2(source / path, target / path, follow_symlinks=False)


class VolumeHandlers:
    def __init__(self, state: "State", blobs: Blobs, containers: "Containers") -> None:
        self._state = state
        self._blobs = blobs
        self._containers = containers

    async def VolumeGetOrCreate(self, request: api_pb2.VolumeGetOrCreateRequest) -> Reply:
        volume = self._state.volume(request.deployment_name)
        metadata = volume.metadata()
        return dict(volume_id=volume.id, version=metadata.version, metadata=metadata)

    async def VolumeCommit(self, request: api_pb2.VolumeCommitRequest) -> Reply:
        volume, task_id = self._mounted(request.volume_id, "commit")
        volume.waiting += 1
        await asyncio.to_thread(volume.open.wait)
        volume.waiting -= 1
        await asyncio.to_thread(volume.commit, task_id)
        volume.commits.append(self._containers.event())
        return dict(skip_reload=False)

    async def VolumeReload(self, request: api_pb2.VolumeReloadRequest) -> Reply:
        volume, task_id = self._mounted(request.volume_id, "reload")
        await asyncio.to_thread(volume.reload, task_id)
        return {}

    async def VolumeListFiles(
        self, request: api_pb2.VolumeListFilesRequest
    ) -> AsyncIterator[api_pb2.VolumeListFilesResponse]:
        volume = self._state.volume_of(request.volume_id)
        place = self._existing(volume, request.path)
        paths = (place.rglob("*") if request.recursive else place.iterdir()) if place.is_dir() else [place]
        entries = [_entry(path, volume.committed()) for path in sorted(paths)]
        yield api_pb2.VolumeListFilesResponse(entries=entries)

    async def VolumeGetFile2(self, request: api_pb2.VolumeGetFile2Request) -> Reply:
        size = self._existing(self._state.volume_of(request.volume_id), request.path).stat().st_size
        length = request.len or size - request.start
        cuts = range(request.start, request.start + length, BLOCK)
        urls = [
            self._blobs.file_url(
                request.volume_id, request.path, cut, min(BLOCK, request.start + length - cut)
            )
            for cut in cuts
        ]
        return dict(get_urls=urls, size=size, start=request.start, len=length)

    async def VolumePutFiles(self, request: api_pb2.VolumePutFilesRequest) -> Reply:
        volume = self._state.volume_of(request.volume_id)
        for file in request.files:
            volume.put(file.filename, self._state.contents.read(file.sha256_hex))
        return {}

    def _mounted(self, volume_id: str, action: str) -> tuple[Volume, str]:
        volume, task_id = self._state.volume_of(volume_id), CALLER.get().task_id
        if task_id not in volume.views:
            raise GRPCError(
                Status.FAILED_PRECONDITION,
                f"Volume '{volume.name}': {action} works only in a container that has the volume mounted",
            )
        return volume, task_id

    def _existing(self, volume: Volume, path: str) -> Path:
        place = volume.place(path)
        if not place.exists():
            raise GRPCError(Status.NOT_FOUND, f"No such file or directory in volume '{volume.name}': {path}")
        return place


def _entry(path: Path, root: Path) -> api_pb2.FileEntry:
    status = path.stat()
    kind = api_pb2.FileEntry.DIRECTORY if path.is_dir() else api_pb2.FileEntry.FILE
    return api_pb2.FileEntry(
        path=path.relative_to(root).as_posix(), type=kind, mtime=int(status.st_mtime), size=status.st_size
    )
