"""Volumes: folders on disk, with commits.

A volume is two folders. Containers work in one, whose path is the same for all of them as a mount path would
be; clients see the other, which is what was last committed. A commit copies the first to the second, file by
file where they differ. When a container starts and no other has the volume mounted, its folder is set back to
the last commit: what a killed container left half-written is gone, as it is at Modal.

Where this is not Modal: containers that run at the same time share one folder, so one sees the other's writes
before the commit and without a reload. A container that starts while such writes are there would not have
seen them at Modal: that is a bug of the app, and is recorded in `Volume.unseen`. A client's upload is in both
folders at once.
"""

import contextlib
import shutil
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.blobs import BLOCK, Blobs
from modal_plane.servicer import Caller

if TYPE_CHECKING:
    from modal_plane.containers import Containers
    from modal_plane.state import State


@dataclass(frozen=True)
class Commit:
    """A commit or reload of a volume by a container."""

    function: str
    call_id: str
    at_exit: bool
    """Whether it is the one that Modal's entrypoint makes when the container ends."""


@dataclass(frozen=True)
class Unseen:
    """Files that a container would not have seen at Modal when it started, as no one had committed them."""

    function: str
    paths: tuple[str, ...]


class Volume:
    """A named volume."""

    def __init__(self, name: str, volume_id: str, folder: Path, version: int) -> None:
        self.name = name
        self.id = volume_id
        self.version = version
        self.folder = folder / name / "mounted"
        self._committed = folder / name / "committed"
        self.folder.mkdir(parents=True)
        self._committed.mkdir()
        self.commits: list[Commit] = []
        self.reloads: list[Commit] = []
        self.unseen: list[Unseen] = []
        self.mounted_by: set[str] = set()

    def committed(self) -> Path:
        """The folder with the last committed state: what a client sees, and a new container finds."""
        return self._committed

    def put(self, path: str, content: bytes) -> None:
        """Put a file there, as a client's upload does."""
        committed, mounted = self.places(path)
        for place in (committed, mounted):
            place.parent.mkdir(parents=True, exist_ok=True)
        committed.write_bytes(content)
        # With its time, so that the two count as the same.
        shutil.copy2(committed, mounted)

    def put_folder(self, local: Path, path: str = "/") -> None:
        """Put a folder's files there."""
        for place in self.places(path):
            shutil.copytree(local, place, dirs_exist_ok=True)

    def revert_to_commit(self) -> None:
        """Set the containers' folder back to the last committed state."""
        mirror(self._committed, self.folder)

    def commit(self) -> None:
        """Make the containers' folder the committed state."""
        mirror(self.folder, self._committed)

    def mount(self, function: str, task_id: str) -> None:
        """A container of the function starts with it."""
        if not self.mounted_by:
            self.revert_to_commit()
        elif paths := differences(self.folder, self._committed):
            self.unseen.append(Unseen(function, paths))
        self.mounted_by.add(task_id)

    def places(self, path: str) -> tuple[Path, Path]:
        """A path in the volume: in the committed and in the containers' folder.

        Raises:
            GRPCError: INVALID_ARGUMENT for a path that leaves the volume.
        """
        relative = PurePosixPath(path.lstrip("/"))
        if ".." in relative.parts:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{path!r} is not a path in a volume")
        return self._committed / relative, self.folder / relative

    def metadata(self) -> api_pb2.VolumeMetadata:
        """The description that a client gets."""
        version = api_pb2.VOLUME_FS_VERSION_V2 if self.version == 2 else api_pb2.VOLUME_FS_VERSION_V1
        return api_pb2.VolumeMetadata(version=version, name=self.name)


def _tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Size, time and mode by relative path, of all files that do not vanish meanwhile."""
    entries: dict[str, tuple[object, ...]] = {}
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


def differences(one: Path, other: Path) -> tuple[str, ...]:
    """Relative paths of the files that differ between both folders, by size, time of change or mode."""
    first, second = _tree(one), _tree(other)
    return tuple(sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path)))


def mirror(source: Path, target: Path) -> None:
    """Make `target` the same as `source`, touching only what differs."""
    wanted, present = _tree(source), _tree(target)
    for path in sorted(present, reverse=True):
        if path not in wanted or wanted[path][0] != present[path][0]:
            _remove(target / path)
            present.pop(path)
    for path in sorted(wanted):
        if wanted[path] == present.get(path):
            continue
        if wanted[path][0] == stat.S_IFDIR:
            (target / path).mkdir(parents=True, exist_ok=True)
        elif wanted[path][0] in (stat.S_IFREG, stat.S_IFLNK):
            with contextlib.suppress(FileNotFoundError):
                (target / path).unlink(missing_ok=True)
                shutil.copy2(source / path, target / path, follow_symlinks=False)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class VolumeHandlers:
    """Handlers of volumes, of both versions: they differ in how files are uploaded."""

    def __init__(self, state: "State", blobs: Blobs, containers: "Containers") -> None:
        self._state = state
        self._blobs = blobs
        self._containers = containers

    async def VolumeGetOrCreate(
        self, request: api_pb2.VolumeGetOrCreateRequest, caller: Caller
    ) -> api_pb2.VolumeGetOrCreateResponse:
        name, creation = request.deployment_name, request.object_creation_type
        if name in self._state.volumes and creation == api_pb2.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS:
            raise GRPCError(Status.ALREADY_EXISTS, f"Volume '{name}' already exists")
        if name not in self._state.volumes and creation == api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED:
            raise GRPCError(Status.NOT_FOUND, f"Volume '{name}' not found in environment 'main'")
        volume = self._state.volume(name, 2 if request.version == api_pb2.VOLUME_FS_VERSION_V2 else 1)
        metadata = volume.metadata()
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=volume.id, version=metadata.version, metadata=metadata
        )

    async def VolumeGetById(
        self, request: api_pb2.VolumeGetByIdRequest, caller: Caller
    ) -> api_pb2.VolumeGetByIdResponse:
        volume = self._state.volume_of(request.volume_id)
        return api_pb2.VolumeGetByIdResponse(volume_id=volume.id, metadata=volume.metadata())

    async def VolumeList(
        self, request: api_pb2.VolumeListRequest, caller: Caller
    ) -> api_pb2.VolumeListResponse:
        items = [
            api_pb2.VolumeListItem(label=name, volume_id=volume.id, metadata=volume.metadata())
            for name, volume in self._state.volumes.items()
        ]
        return api_pb2.VolumeListResponse(items=items, environment_name="main")

    async def VolumeCommit(
        self, request: api_pb2.VolumeCommitRequest, caller: Caller
    ) -> api_pb2.VolumeCommitResponse:
        volume = self._mounted(request.volume_id, caller, "commit")
        volume.commit()
        volume.commits.append(self._containers.event(caller))
        # One folder for all containers: there is nothing to load after it.
        return api_pb2.VolumeCommitResponse(skip_reload=True)

    async def VolumeReload(self, request: api_pb2.VolumeReloadRequest, caller: Caller) -> Empty:
        volume = self._mounted(request.volume_id, caller, "reload")
        volume.reloads.append(self._containers.event(caller))
        return Empty()

    async def VolumeListFiles(
        self, request: api_pb2.VolumeListFilesRequest | api_pb2.VolumeListFiles2Request, caller: Caller
    ) -> AsyncIterator[api_pb2.VolumeListFilesResponse]:
        volume = self._state.volume_of(request.volume_id)
        place = self._existing(volume, request.path)
        paths = (place.rglob("*") if request.recursive else place.iterdir()) if place.is_dir() else [place]
        entries = [_entry(path, volume.committed()) for path in sorted(paths)]
        yield api_pb2.VolumeListFilesResponse(entries=entries)

    async def VolumeListFiles2(
        self, request: api_pb2.VolumeListFiles2Request, caller: Caller
    ) -> AsyncIterator[api_pb2.VolumeListFiles2Response]:
        async for reply in self.VolumeListFiles(request, caller):
            yield api_pb2.VolumeListFiles2Response(entries=reply.entries)

    async def VolumeGetFile2(
        self, request: api_pb2.VolumeGetFile2Request, caller: Caller
    ) -> api_pb2.VolumeGetFile2Response:
        size = self._existing(self._state.volume_of(request.volume_id), request.path).stat().st_size
        length = request.len or size - request.start
        cuts = range(request.start, request.start + length, BLOCK)
        urls = [
            self._blobs.file_url(
                request.volume_id, request.path, cut, min(BLOCK, request.start + length - cut)
            )
            for cut in cuts
        ]
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=size, start=request.start, len=length)

    async def VolumePutFiles(self, request: api_pb2.VolumePutFilesRequest, caller: Caller) -> Empty:
        volume = self._state.volume_of(request.volume_id)
        self._refuse_overwriting(
            volume, [file.filename for file in request.files], request.disallow_overwrite_existing_files
        )
        for file in request.files:
            volume.put(file.filename, self._state.contents.read(file.sha256_hex))
        return Empty()

    async def VolumePutFiles2(
        self, request: api_pb2.VolumePutFiles2Request, caller: Caller
    ) -> api_pb2.VolumePutFiles2Response:
        volume, contents = self._state.volume_of(request.volume_id), self._state.contents
        self._refuse_overwriting(
            volume, [file.path for file in request.files], request.disallow_overwrite_existing_files
        )
        missing = [
            api_pb2.VolumePutFiles2Response.MissingBlock(
                file_index=number,
                block_index=index,
                put_url=self._blobs.block_url(block.contents_sha256.hex()),
            )
            for number, file in enumerate(request.files)
            for index, block in enumerate(file.blocks)
            if block.contents_sha256.hex() not in contents
        ]
        if not missing:
            for file in request.files:
                # A block comes without the zeros at its end.
                blocks = [
                    contents.read(block.contents_sha256.hex()).ljust(BLOCK, b"\0") for block in file.blocks
                ]
                volume.put(file.path, b"".join(blocks)[: file.size])
        return api_pb2.VolumePutFiles2Response(missing_blocks=missing)

    async def VolumeRemoveFile(
        self, request: api_pb2.VolumeRemoveFileRequest | api_pb2.VolumeRemoveFile2Request, caller: Caller
    ) -> Empty:
        volume = self._state.volume_of(request.volume_id)
        if self._existing(volume, request.path).is_dir() and not request.recursive:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{request.path!r} is a folder: remove it recursively")
        for place in volume.places(request.path):
            _remove(place)
        return Empty()

    async def VolumeRemoveFile2(self, request: api_pb2.VolumeRemoveFile2Request, caller: Caller) -> Empty:
        return await self.VolumeRemoveFile(request, caller)

    async def VolumeDelete(self, request: api_pb2.VolumeDeleteRequest, caller: Caller) -> Empty:
        volume = self._state.volume_of(request.volume_id)
        del self._state.volumes[volume.name]
        shutil.rmtree(volume.folder.parent)
        return Empty()

    def _mounted(self, volume_id: str, caller: Caller, action: str) -> Volume:
        volume = self._state.volume_of(volume_id)
        if caller.task_id is None or caller.task_id not in volume.mounted_by:
            raise GRPCError(
                Status.FAILED_PRECONDITION,
                f"Volume '{volume.name}': {action} works only in a container that has the volume mounted",
            )
        return volume

    def _existing(self, volume: Volume, path: str) -> Path:
        place, _ = volume.places(path)
        if not place.exists():
            raise GRPCError(Status.NOT_FOUND, f"No such file or directory in volume '{volume.name}': {path}")
        return place

    def _refuse_overwriting(self, volume: Volume, paths: list[str], refuse: bool) -> None:
        present = [path for path in paths if volume.places(path)[0].exists()]
        if refuse and present:
            raise GRPCError(Status.ALREADY_EXISTS, f"{present[0]}: already exists in volume '{volume.name}'")


def _entry(path: Path, root: Path) -> api_pb2.FileEntry:
    status = path.stat()
    kind = api_pb2.FileEntry.DIRECTORY if path.is_dir() else api_pb2.FileEntry.FILE
    return api_pb2.FileEntry(
        path=path.relative_to(root).as_posix(), type=kind, mtime=int(status.st_mtime), size=status.st_size
    )
