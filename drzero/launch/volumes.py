"""The volumes (`/corpus`, `/checkpoints`, `/cache`): their names, mounts, and folders in a container.

The Dict `dr-zero-claims` has the calls that work on them. With EXPERIMENTER set (in the environment or in
`.env`) each name ends in `-EXPERIMENTER-EXPERIMENT_NAME` (by default `default`), so people share none.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from drzero.launch.errors import LaunchError

MOUNTS = {"corpus": "/corpus", "checkpoints": "/checkpoints", "cache": "/cache"}
LAUNCHES = "launches"  # the folder of the checkpoints volume with one folder for each run's launches
NAMING = ("EXPERIMENTER", "EXPERIMENT_NAME")  # the variables that name the volumes
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def volume_names(environment: Mapping[str, str]) -> dict[str, str]:
    """The volumes' names by kind. Raises LaunchError for a name Modal would refuse."""
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


def name_beside(names: Mapping[str, str], what: str) -> str:
    """The name of a Dict (`claims`) or an app (`search`, `agent`) that belongs to these volumes."""
    return names["corpus"].replace("corpus", what, 1)


def place(kind: str) -> Path:
    """The volume's folder in this container. DRZERO_MOUNT_CORPUS and the like set another."""
    return Path(os.environ.get(f"DRZERO_MOUNT_{kind.upper()}") or MOUNTS[kind])


def folder_overrides() -> list[str]:
    """The overrides with which a stage in this container uses the volumes."""
    return [f"paths.{kind}={place(kind)}" for kind in ("corpus", "checkpoints")]


def launch_folder(name: str) -> Path:
    """The folder with request, state, cost and console of a run's launches."""
    return place("checkpoints") / LAUNCHES / name
