"""The retrieval service on Modal: its machine, and `drzero serve-search` in its container."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from drzero.launch.compute import Compute
from drzero.launch.errors import LaunchError
from drzero.launch.runfile import RunFile
from drzero.launch.service import PORT, START_S, Service
from drzero.launch.volumes import place


def described(file: RunFile, path: str, environment: Mapping[str, str]) -> tuple[Compute, list[str]]:
    """Machine and overrides. Raises LaunchError."""
    machine = file.machine(file.base or "cpu")
    if machine.type is not None:
        raise LaunchError(f"{path}: compute.type is {machine.type}: the service embeds and searches on a CPU")
    return machine, [*machine.overrides(), *file.overrides]


SEARCH = Service(
    "search",
    "serve-search",
    "RETRIEVAL_TOKEN",
    ("HF_TOKEN", "CHROMA_API_KEY"),
    ("corpus", "cache"),
    described,
)


def words_here(words: Sequence[str], port: int = PORT) -> list[str]:
    """The service's overrides, with this container's folders and address."""
    logs = Path(tempfile.gettempdir()) / "search"
    return [
        f"paths.corpus={place('corpus')}",
        f"paths.checkpoints={logs}",
        f"retrieval.startup_budget_s={START_S}",
        *words,
        "retrieval.host=0.0.0.0",
        f"retrieval.port={port}",
        # Modal replaces a container whose port was closed once, so a restart inside it is useless.
        "retrieval.restarts=0",
    ]
