"""The volumes: their names, mount paths, and folders in a container.

| volume | mounted at | holds |
|---|---|---|
| `dr-zero-corpus` | `/corpus` | `chromadb/`, `faiss/`, `data/`, `models/` |
| `dr-zero-checkpoints` | `/checkpoints` | `challenger_iter1/`, …, `launches/` |
| `dr-zero-cache` | `/cache` | hub and package caches |

Next to them is a Dict, `dr-zero-claims`, of the calls that work on them (`drzero.launch.claims`).

With EXPERIMENTER set (in the environment or in `.env`) each name ends in `-EXPERIMENTER-EXPERIMENT_NAME`, so
that two people, or two experiments of one person, do not share volumes. EXPERIMENT_NAME defaults to
`default`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from drzero.launch.errors import LaunchError

MOUNTS = {"corpus": "/corpus", "checkpoints": "/checkpoints", "cache": "/cache"}
"""Mount path by kind."""
LAUNCHES = "launches"
"""Folder of the checkpoints volume with one folder a launch."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def volume_names(environment: Mapping[str, str]) -> dict[str, str]:
    """The volumes' names by kind; raises LaunchError for a name that Modal would refuse."""
    who = environment.get("EXPERIMENTER", "").strip()
    what = environment.get("EXPERIMENT_NAME", "").strip()
    if what and not who:
        raise LaunchError(
            f"EXPERIMENT_NAME={what} without EXPERIMENTER: set both, or neither for the shared volumes"
        )
    if not who:
        return {kind: f"dr-zero-{kind}" for kind in MOUNTS}
    for key, value in (("EXPERIMENTER", who), ("EXPERIMENT_NAME", what or "default")):
        if not _NAME.fullmatch(value):
            raise LaunchError(
                f"{key}={value!r}: volume names have letters, digits, '.', '_' and '-', 64 at most"
            )
    names = {kind: f"dr-zero-{kind}-{who}-{what or 'default'}" for kind in MOUNTS}
    if len(longest := max(names.values(), key=len)) > 64:
        raise LaunchError(
            f"EXPERIMENTER and EXPERIMENT_NAME make {longest!r}: a volume's name has 64 letters at most, "
            f"this one {len(longest)}; shorten them"
        )
    return names


def claims_name(names: Mapping[str, str]) -> str:
    """Name of the Dict with the claims of the runs on these volumes."""
    return _next_to(names, "claims")


def search_name(names: Mapping[str, str]) -> str:
    """Name of the app that serves the index of these volumes (`modal_search.py`)."""
    return _next_to(names, "search")


def _next_to(names: Mapping[str, str], what: str) -> str:
    return names["corpus"].replace("corpus", what, 1)


def place(kind: str) -> Path:
    """The volume's folder in this container; DRZERO_MOUNT_CORPUS, for one, sets another."""
    return Path(os.environ.get(f"DRZERO_MOUNT_{kind.upper()}") or MOUNTS[kind])


def launch_folder(name: str) -> Path:
    """Where a container stores request, state, cost and console of a run's launches."""
    return place("checkpoints") / LAUNCHES / name
