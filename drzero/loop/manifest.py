"""The loop's manifest: one JSON file with each stage's state, inputs and outputs, replaced atomically."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from drzero.ops.artefacts import announce
from drzero.ops.errors import UserError
from drzero.ops.files import atomic_write
from drzero.ops.versions import installed_versions

State = Literal["pending", "running", "failed", "complete", "forgotten"]
"""A forgotten stage is to be redone, and its results are being removed."""


class LoopChanged(UserError):
    """Finished stages no longer fit the present settings, inputs or outputs."""


@dataclass
class StageEntry:
    """The record of one stage run."""

    state: State = "pending"
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str | None] = field(default_factory=dict)  # content identity of each input, by name
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name `path`, content `identity`, and whether it was `pruned` since."""
    versions: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    started: float | None = None
    seconds: float = 0.0  # Wall-clock time over all starts
    tokens: int = 0  # tokens that models read or wrote
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_pruned(self) -> bool:
        """Whether its checkpoint has been removed, or is being removed."""
        return any(output["pruned"] for output in self.outputs.values())


class _File(msgspec.Struct):
    stages: dict[str, StageEntry]


class Manifest:
    """The entries by stage run, and their file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, StageEntry] = {}
        if path.is_file():
            try:
                self.entries = msgspec.json.decode(path.read_bytes(), type=_File).stages
            except msgspec.MsgspecError as error:
                raise LoopChanged(
                    f"{path} is no loop's manifest ({error}): restore it, or move it away"
                ) from error

    def entry(self, name: str) -> StageEntry:
        """The entry of a stage run, created if missing."""
        return self.entries.setdefault(name, StageEntry())

    def is_complete(self, name: str) -> bool:
        """Whether a stage run is finished."""
        return self.entry(name).state == "complete"

    def save(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"stages": {name: asdict(entry) for name, entry in self.entries.items()}}
        atomic_write(self.path, json.dumps(record, indent=1, ensure_ascii=False))
        announce(self.path)

    def begin(self, name: str, config: dict[str, Any], inputs: dict[str, str | None]) -> None:
        """Record that a stage starts now."""
        entry = self.entry(name)
        entry.state, entry.config, entry.inputs, entry.error = "running", config, inputs, None
        entry.versions, entry.started = installed_versions(), time.time()
        entry.starts += 1
        self.save()

    def end(self, name: str, state: State, error: str | None = None) -> None:
        """Record that a running stage has ended."""
        entry = self.entry(name)
        entry.state, entry.error = state, error
        entry.seconds += time.time() - (entry.started or time.time())
        self.save()
