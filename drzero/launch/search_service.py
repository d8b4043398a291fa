"""The retrieval service in a container on Modal: `drzero serve-search` on its own machine."""

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

PORT = 8000  # The service's port in its container. Modal serves it over TLS at another address.
START_S = 1800
"""Seconds until it must answer: Chroma first reads its index into memory, and a model may be downloaded."""
_USED = ("compute", "overrides", "image")
_OF_RUNS = ("max_usd", "timeout", "retries")


def described(file: RunFile, path: str, token: str | None) -> tuple[Compute, list[str]]:
    """Machine and overrides. Requests must carry `token`: the address is public. Raises LaunchError."""
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


def start(words: Sequence[str], port: int = PORT) -> None:
    """Start the service and return. The container ends with it, and Modal starts another."""
    command = [sys.executable, "-m", "drzero.cli", "serve-search", *words_here(words, port)]
    child = subprocess.Popen(command)

    def end_with_it() -> None:
        code = child.wait()
        print(f"[search] the service has ended with exit code {code}, and so does its container", flush=True)
        os._exit(code or 1)

    threading.Thread(target=end_with_it, daemon=True).start()
