"""The retrieval service in a container on Modal: its machine, its command, and its end.

    machine, words = described("config/runs/search.yaml")   # at the client
    start(words)                                            # in the container

The service is `drzero serve-search`, with the checks and settings of any other machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from drzero.launch.compute import Compute
from drzero.launch.errors import LaunchError
from drzero.launch.runfile import RunFile
from drzero.launch.volumes import place

PORT = 8000
"""Of the service in its container; Modal has it answer at an address of its own, over TLS."""
START_S = 1800
"""Until it answers: Chroma reads its index into memory first, and a model may be downloaded."""
_USED = ("compute", "overrides", "image")
_OF_RUNS = ("max_usd", "timeout", "retries")
"""Keys of a machine that are limits of a run; a service stays until its app is stopped."""


def described(file: RunFile, path: str, token: str | None) -> tuple[Compute, list[str]]:
    """Return machine and overrides of a run file; raises LaunchError for what cannot be served with.

    `token` is what the service would ask for: its address is open to the internet.
    """
    if not token:
        raise LaunchError("RETRIEVAL_TOKEN is not set: the service's address is public; put one into .env")
    limits = [key for key in _OF_RUNS if isinstance(file.compute, dict) and key in file.compute]
    if limits:
        raise LaunchError(f"{path}: compute.{limits[0]}: a service has none; it stays until it is stopped")
    others = [key for key, value in vars(file).items() if value and key not in _USED]
    if others:
        raise LaunchError(f"{path}: {others[0]}: a retrieval service has {', '.join(_USED)} alone")
    machine = file.machine(file.base or "cpu")
    if machine.type is not None:
        raise LaunchError(f"{path}: compute.type is {machine.type}: the service embeds and searches on a CPU")
    return machine, [*machine.overrides(), *file.overrides]


def words_here(words: Sequence[str], port: int = PORT) -> list[str]:
    """The overrides of the service, with the folders and the address of this container."""
    logs = Path(tempfile.gettempdir()) / "search"
    return [
        *(f"paths.corpus={place('corpus')}", f"paths.checkpoints={logs}"),
        *(f"retrieval.startup_budget_s={START_S}", *words),
        # Modal replaces a container whose port was closed once, so the service is not started again in it.
        *("retrieval.host=0.0.0.0", f"retrieval.port={port}", "retrieval.restarts=0"),
    ]


def start(words: Sequence[str], port: int = PORT) -> None:
    """Start the service and return; the container ends with it, and Modal starts another."""
    command = [sys.executable, "-m", "drzero.cli", "serve-search", *words_here(words, port)]
    child = subprocess.Popen(command)

    def end_with_it() -> None:
        code = child.wait()
        print(f"[search] the service has ended with exit code {code}, and so does its container", flush=True)
        os._exit(code or 1)

    threading.Thread(target=end_with_it, daemon=True).start()
