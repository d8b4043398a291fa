"""Reads the small files of runs and checkpoints. A damaged one raises CheckError, whatever is in it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from drzero.ops.files import open_regular
from drzero.recipe.compose import RESOLVED
from drzero.recipe.errors import CheckError


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckError, which says `what` the file is for."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckError(f"{path} ({what}) cannot be read: {in_one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckError(f"{path} ({what}) holds no JSON object")
    return content


def read_settings(run: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """The settings of a run's last start, None for a missing one. Raises CheckError for a damaged file."""
    path = run / f"{RESOLVED}.yaml"
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            config = OmegaConf.load(file)
        return {key: OmegaConf.select(config, key) for key in keys}
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise CheckError(
            f"{path} (the settings of the last start) cannot be read: {in_one_line(error)}. Restore it, or "
            "move it away if you know that the settings were the same"
        ) from error


def in_one_line(error: BaseException) -> str:
    """An error's kind and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
