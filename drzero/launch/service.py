"""A service on Modal: a `drzero serve-…` in its own container, at a public address, behind a token.

The apps are modal_search.py and modal_agent.py. A run file below config/ has the machine and the overrides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal

from drzero.launch.compute import Compute
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import SOURCE, ImageExtras, cpu_image, gpu_image
from drzero.launch.runfile import RunFile, read_runfile
from drzero.launch.secrets import client_environment
from drzero.launch.volumes import MOUNTS, NAMING, name_beside, volume_names

PORT = 8000  # The service's port in its container. Modal serves it over TLS at another address.
START_S = 1800
"""Seconds until it must answer: Chroma first reads its index into memory, and a model may be downloaded."""
REQUESTS = 1000  # Requests at once in a container. The service itself refuses more than it can take.
_USED = ("compute", "overrides", "image")
_OF_RUNS = ("max_usd", "timeout", "retries")


@dataclass(frozen=True)
class Service:
    """The parts in which services differ."""

    name: str  # in the names of its app and its run file
    command: str  # of `drzero`
    token: str  # the variable with the token that requests must carry
    keys: tuple[str, ...]  # the other secrets of `.env` that its container gets: it is open to the internet
    volumes: tuple[str, ...]
    describe: Callable[[RunFile, str, Mapping[str, str]], tuple[Compute, list[str]]]
    """Machine and overrides of a run file, its path, and the client's environment. Raises LaunchError."""
    variables: tuple[str, ...] = ()  # the other variables that it reads


@dataclass(frozen=True)
class Plan:
    """A service as the client asks for it, and as its container finds it again."""

    name: str  # the app's
    machine: Compute
    words: list[str]  # overrides
    image: ImageExtras
    shared: dict[str, Any]  # options of all its functions

    def on_machine(self) -> dict[str, Any]:
        """The options of a function on the service's machine."""
        image = gpu_image if self.machine.type else cpu_image
        asked = self.machine.modal_options()
        return {
            **self.shared,
            "image": image(self.image),
            **{key: asked[key] for key in ("gpu", "cpu", "memory", "region")},
        }


def planned(service: Service, root: Path) -> Plan:
    """Plan before Modal builds anything, and exit with 2 on a mistake."""
    try:
        return _plan(service, client_environment(root))
    except LaunchError as error:
        print(f"modal_{service.name}: {error}", file=sys.stderr)
        sys.exit(2)


def _plan(service: Service, environment: Mapping[str, str]) -> Plan:
    variable = f"DRZERO_{service.name.upper()}_FILE"
    path = environment.get(variable) or f"config/runs/{service.name}.yaml"
    if not environment.get(service.token):
        raise LaunchError(f"{service.token} is not set: the service's address is public; put one into .env")
    if Path(path).parts[0] not in SOURCE:
        raise LaunchError(f"{variable}={path}: a container reads it too: put it under config/")
    file = read_service_file(path)
    machine, words = service.describe(file, path, environment)
    extras, names = ImageExtras.of(file.image), volume_names(environment)
    cpu_image(extras)  # so that a mistake in the additions is one line
    volumes = {
        MOUNTS[kind]: modal.Volume.from_name(names[kind], create_if_missing=True) for kind in service.volumes
    }
    secrets: dict[str, str | None] = {key: environment.get(key, "") for key in (service.token, *service.keys)}
    # A container imports the app's file too, without the `.env`.
    env = {key: environment.get(key, "") for key in (*NAMING, *service.variables)} | {variable: path}
    shared = {"volumes": volumes, "secrets": [modal.Secret.from_dict(secrets)], "env": env}
    return Plan(name_beside(names, service.name), machine, words, extras, shared)


def read_service_file(path: str) -> RunFile:
    """A run file without the fields of runs. Raises LaunchError."""
    file = read_runfile(path)
    limits = [key for key in _OF_RUNS if isinstance(file.compute, dict) and key in file.compute]
    if limits:
        raise LaunchError(f"{path}: compute.{limits[0]}: a service has none; it stays until it is stopped")
    others = [key for key, value in vars(file).items() if value and key not in _USED]
    if others:
        raise LaunchError(f"{path}: {others[0]}: a service has {', '.join(_USED)} alone")
    return file


def start(command: str, words: Sequence[str]) -> None:
    """Start `drzero COMMAND WORDS…` and return. The container ends with it, and Modal starts another."""
    # Only Modal's proxy reaches the port. Links in answers need the public address, which its headers have.
    env = {**os.environ, "FORWARDED_ALLOW_IPS": "*"}
    child = subprocess.Popen([sys.executable, "-m", "drzero.cli", command, *words], env=env)

    def end_with_it() -> None:
        code = child.wait()
        print(f"[{command}] has ended with exit code {code}, and so does its container", flush=True)
        os._exit(code or 1)

    threading.Thread(target=end_with_it, daemon=True).start()


def preflight(command: str, words: Sequence[str]) -> int:
    """Run `drzero preflight COMMAND WORDS…` here. Returns the exit code."""
    from drzero.launch.container import run_module

    return run_module("drzero.cli", ["preflight", command, *words])
