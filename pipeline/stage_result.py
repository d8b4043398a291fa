"""What a finished stage leaves for the loop: `result.json` in its run folder.

Written last, so a stage without it is not finished. `outputs` are what later stages read; `tokens` counts
what the stage had a model read or write, as far as it can know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ops.atomic import atomic_write
from verl_ext.artefacts import announce

RESULT = "result.json"


@dataclass(frozen=True)
class StageResult:
    """Outputs by name, tokens spent, and the figures worth showing."""

    outputs: dict[str, Path]
    tokens: int
    figures: dict[str, Any]


def write_result(
    config: DictConfig, outputs: Mapping[str, Path], tokens: int, figures: Mapping[str, Any]
) -> None:
    """Say that the stage is finished."""
    folder = Path(config.run.dir)
    record = {
        "outputs": {name: str(path) for name, path in outputs.items()},
        "tokens": tokens,
        "figures": dict(figures),
    }
    atomic_write(folder / RESULT, json.dumps(record, indent=1))
    announce(folder / RESULT)


def read_result(folder: Path) -> StageResult | None:
    """The result in a run folder; None when the stage has not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    outputs = {name: Path(output) for name, output in record["outputs"].items()}
    return StageResult(outputs, int(record["tokens"]), record["figures"])
