"""The loop's manifest: one JSON file that says what has been done, on which inputs, to which outputs.

It is what makes the loop resumable and its results accountable. Each entry records a stage's state, its
config as far as it can change results, its inputs and outputs by content, the versions, the time and the
tokens spent. It is replaced whole on every change, so a kill leaves the old one or the new one.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ops.atomic import atomic_write
from verl_ext.artefacts import announce

State = Literal["pending", "running", "failed", "complete", "forgotten"]
"""Forgotten: to be done again, its results are being removed."""
PACKAGES = ("verl", "torch", "transformers", "ray", "sglang", "chromadb", "sentence-transformers")


class LoopChanged(ValueError):
    """Finished stages no longer fit the settings, inputs or outputs there are now."""


@dataclass
class StageEntry:
    """What is known of one stage run."""

    state: State = "pending"
    config: dict[str, Any] = field(default_factory=dict)
    """The settings that can change its results, flat (see `pipeline.stage_identity`)."""
    inputs: dict[str, str | None] = field(default_factory=dict)
    """Content identity of each input, by name."""
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per output its `path`, its content `identity`, and whether it has been `pruned` since."""
    versions: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    started: float | None = None
    """Unix time of the last start."""
    seconds: float = 0.0
    """Wall-clock time over all starts."""
    tokens: int = 0
    """Tokens that models read or wrote, as the stage counts them."""
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """First line of what ended the last start, where it failed."""


class Manifest:
    """The entries by stage run, in the file they are kept in."""

    def __init__(self, path: Path) -> None:
        """Read the manifest at `path`; an absent one is empty."""
        self.path = path
        self.entries: dict[str, StageEntry] = {}
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            self.entries = {name: StageEntry(**entry) for name, entry in record["stages"].items()}

    def entry(self, name: str) -> StageEntry:
        """The entry of a stage run, a new one where there is none."""
        return self.entries.setdefault(name, StageEntry())

    def is_complete(self, name: str) -> bool:
        """Whether a stage run has been finished."""
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


def installed_versions() -> dict[str, str]:
    """Versions of the packages that results depend on, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
