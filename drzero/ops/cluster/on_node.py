"""Questions that a cluster's node answers: facts to compare with the head's, and stacks."""

import hashlib
import hmac
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drzero.ops.process.tree import descendants
from drzero.ops.versions import installed_versions
from drzero.ops.watchdog.stacks import dump_stacks

_ROOT = Path(__file__).resolve().parents[3]
_IMPORTED = ("verl_ext", "environments", "search", "data", "drzero/ops")
"""The packages of this project that veRL's workers import."""


def facts(marker: str, salt: str, variables: Sequence[str]) -> dict[str, Any]:
    """Return facts that must agree on all nodes. The secret `variables` leave it only as salted hashes."""
    return {
        "host": socket.gethostname(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "versions": installed_versions(),
        "code": code_digest(),
        "sees_folder": not marker or Path(marker).is_file(),
        "secrets": {name: _hidden(os.environ.get(name, "").strip(), salt) for name in variables},
    }


def _hidden(secret: str, salt: str) -> str:
    return hmac.new(salt.encode(), secret.encode(), "sha256").hexdigest() if secret else ""


def code_digest() -> str:
    """Return a sha256 (hex) of the names and contents of all files that workers import."""
    digest = hashlib.sha256()
    for package in _IMPORTED:
        for path in sorted((_ROOT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def stacks(deadline_s: float, native: bool) -> list[dict[str, Any]]:
    """Return the stacks of the busy Python processes that Ray started on this node."""
    raylet = os.getppid()  # the parent of every Ray worker on its node
    found = [
        ("trainer", process)
        for process in descendants([raylet])[raylet][1:]
        if process.is_python and process.pid != os.getpid() and not _is_rays_own(process.title)
    ]
    return [asdict(stack) for stack in dump_stacks(found, deadline_s, native)]


def _is_rays_own(title: str) -> bool:
    return title.startswith("ray::IDLE") or "/ray/dashboard/" in title or "/ray/_private/" in title
