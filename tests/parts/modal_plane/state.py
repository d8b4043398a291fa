"""Everything the server received, in a launcher's terms, and the tables that the handlers share."""

import asyncio
import contextlib
import hashlib
import shlex
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.blobs import Contents
from modal_plane.volumes import Volume

ENVIRONMENT = "main"
"""Name of the one environment."""


def new_id(prefix: str) -> str:
    """An id as Modal's are: `prefix`, a dash and 22 letters and digits."""
    return f"{prefix}-{uuid.uuid4().hex[:22]}"


def content_id(prefix: str, content: bytes) -> str:
    return f"{prefix}-{hashlib.sha256(content).hexdigest()[:22]}"


class Bell:
    """Wakes all that wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Return at the next ring, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)


@dataclass(frozen=True)
class SecretUse:
    """A secret as a function asks for it: by name, or without one, from a dictionary or `.env` file."""

    name: str | None
    values: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Layer:
    """One build step of an image."""

    commands: tuple[str, ...]
    context_files: dict[str, bytes] = field(repr=False)
    secrets: tuple[SecretUse, ...]


@dataclass(frozen=True)
class Image:
    """An image: its build steps, the base first."""

    id: str
    layers: tuple[Layer, ...]

    @property
    def commands(self) -> list[str]:
        """Of the Dockerfile, in order."""
        return [command for layer in self.layers for command in layer.commands]

    @property
    def environment(self) -> dict[str, str]:
        settings = [shlex.split(command[4:])[0] for command in self.commands if command.startswith("ENV ")]
        return dict(setting.split("=", 1) for setting in settings)

    @property
    def workdir(self) -> str:
        """The last WORKDIR, or Modal's own."""
        folders = [shlex.split(command[8:])[0] for command in self.commands if command.startswith("WORKDIR ")]
        return folders[-1] if folders else "/root"


@dataclass(frozen=True)
class FunctionSpec:
    """A function's requested resources: cores, MiB, seconds."""

    gpu: tuple[str, int] | None
    """Type and count."""
    cpu: float
    memory: int
    timeout: int
    startup_timeout: int
    volumes: dict[str, Volume]
    secrets: tuple[SecretUse, ...]
    image: Image
    files: dict[str, str] = field(repr=False)
    """sha256 by container path of the files added at start: the app's file, local folders, Python sources."""
    regions: tuple[str, ...]
    max_containers: int | None
    min_containers: int | None
    web_server_port: int | None


@dataclass
class Function:
    """A function, or a variant of one that `with_options` made."""

    id: str
    app: "App"
    handle: api_pb2.FunctionHandleMetadata
    definition: api_pb2.Function = field(default_factory=api_pb2.Function)

    @property
    def name(self) -> str:
        return self.handle.function_name


@dataclass
class Call:
    """One input of a function call, and its outcome."""

    id: str
    app_id: str
    function_call_id: str
    function: str
    spec: FunctionSpec
    """What the container gets: the function's own with the variant's options over it."""
    args: tuple[Any, ...]
    spawned: bool
    parent: str | None
    """Id of the calling container's call, or None for the client."""
    status: str = "running"
    """running, success, failure, timeout or terminated."""
    result: Any = None
    attempts: int = 0
    logs: str = ""
    """All that its containers printed."""


class Log:
    def __init__(self) -> None:
        self.batches: list[api_pb2.TaskLogsBatch] = []
        self.bell = Bell()
        self.closed = False

    def add(self, batch: api_pb2.TaskLogsBatch) -> None:
        """Append, numbered, and wake who follows."""
        batch.entry_id = str(len(self.batches) + 1)
        self.batches.append(batch)
        self.bell.ring()

    def close(self) -> None:
        self.closed = True
        self.bell.ring()

    def text(self) -> str:
        return "".join(item.data for batch in self.batches for item in batch.items)


@dataclass
class App:
    id: str
    name: str
    detached: bool
    creator: tuple[str, int] = field(repr=False)
    state: str = "initializing"
    """initializing, running, disconnected (detached, and the client is gone), stopping or stopped."""
    functions: dict[str, Function] = field(default_factory=dict, repr=False)
    log: Log = field(default_factory=Log, repr=False)
    is_left: bool = False
    """Whether its client is gone."""


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = Contents(folder / "contents")
        self.secrets: dict[str, dict[str, str]] = {}
        self.anonymous_secrets: dict[str, SecretUse] = {}
        self.volumes: dict[str, Volume] = {}
        self.dicts: dict[str, dict[bytes, bytes]] = {}
        """Serialized values by key, by the Dict's id."""
        self.mounts: dict[str, tuple[api_pb2.MountFile, ...]] = {}
        self.images: dict[str, Image] = {}
        self.built: list[Image] = []
        self.apps: dict[str, App] = {}
        self.functions: dict[str, Function] = {}
        self.calls: list[Call] = []
        self.requests: list[str] = []
        self.failures: list[str] = []

    def volume(self, name: str) -> Volume:
        if name not in self.volumes:
            self.volumes[name] = Volume(name, content_id("vo", name.encode()), self.folder / "volumes")
        return self.volumes[name]

    def volume_of(self, volume_id: str) -> Volume:
        for volume in self.volumes.values():
            if volume.id == volume_id:
                return volume
        raise GRPCError(Status.NOT_FOUND, f"Volume {volume_id} not found")

    def secret(self, secret_id: str) -> SecretUse:
        if secret_id in self.anonymous_secrets:
            return self.anonymous_secrets[secret_id]
        for name, values in self.secrets.items():
            if content_id("st", name.encode()) == secret_id:
                return SecretUse(name, dict(values))
        raise GRPCError(Status.NOT_FOUND, f"Secret {secret_id} not found")

    def files(self, mount_ids: list[str]) -> dict[str, str]:
        """Container path to sha256 of all files of the mounts."""
        return {file.filename: file.sha256_hex for mount in mount_ids for file in self.mounts[mount]}
