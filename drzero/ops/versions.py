"""The pinned versions, the one table of them: constraints.txt and constraints-gpu.txt, read.

    pinned("verl")                # what the tests run with, on a CPU
    pinned("torch", gpu=True)     # what a machine with GPUs and SGLang has
    installed_versions()          # what a run records

It is on the ground floor because the launcher, preflight and verl_ext all need it and may not import each
other. Standard library only: the launcher reads it at the user's machine.
"""

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_RUN_ON = ("verl", "torch", "transformers", "ray", "sglang", "chromadb", "sentence-transformers")
"""What a run records the versions of."""


def installed_versions() -> dict[str, str]:
    """The versions here of what a run's results depend on; one that is not installed is left out."""
    versions = {}
    for package in _RUN_ON:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def pinned(package: str, *, gpu: bool = False) -> str:
    """The pinned version of a package; KeyError for one that is not pinned."""
    return pinned_versions(gpu=gpu)[package]


@functools.cache
def pinned_versions(*, gpu: bool = False) -> Mapping[str, str]:
    """All pinned versions by normalised name; with `gpu` those of constraints-gpu.txt replace the others."""
    files = ("constraints.txt", "constraints-gpu.txt") if gpu else ("constraints.txt",)
    lines = [line for name in files for line in (_ROOT / name).read_text(encoding="utf-8").splitlines()]
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normalised(name): version.strip() for name, _, version in pairs}


def normalised(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
