"""The pins in constraints.txt and constraints-gpu.txt. Standard library only, for the launcher."""

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_RUN_ON = ("verl", "torch", "transformers", "ray", "sglang", "vllm", "chromadb", "sentence-transformers")


def installed_versions() -> dict[str, str]:
    """Return the installed versions that a run's results depend on."""
    versions = {}
    for package in _RUN_ON:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def pinned(package: str, *, gpu: bool = False) -> str:
    """Return the pinned version of a package. Raises KeyError if it has none."""
    return pinned_versions(gpu=gpu)[package]


@functools.cache
def pinned_versions(*, gpu: bool = False) -> Mapping[str, str]:
    """Return all pins by normalised name. `gpu` adds constraints-gpu.txt, which wins."""
    files = ("constraints.txt", "constraints-gpu.txt") if gpu else ("constraints.txt",)
    lines = [line for name in files for line in (_ROOT / name).read_text(encoding="utf-8").split("\n")]
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normalised(name): version.strip() for name, _, version in pairs}


def normalised(name: str) -> str:
    """Return a package name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
