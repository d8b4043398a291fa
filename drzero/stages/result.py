"""A finished stage's result, which the loop reads: `result.json` in its run folder.

It is written last, so a stage without it is not finished. `outputs` are the files and folders that later
stages read; `tokens` counts the tokens that models read or wrote for the stage, as far as it can know.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drzero.ops.files import atomic_write
from verl_ext.artefacts import announce

RESULT, REPORT = "result.json", "report.json"
SAMPLES = "samples.jsonl"
"""Synthesize's journal: its conversations with the challenger; also the preview's, with their attempts."""
FOUND = "questions.jsonl"
"""Every question of a preview with its fate, a line each."""


@dataclass(frozen=True)
class StageResult:
    """Outputs by name, tokens spent, and the figures of the loop's table."""

    outputs: dict[str, Path]
    tokens: int
    figures: dict[str, Any]


def write_result(
    config: DictConfig, outputs: Mapping[str, Path], tokens: int, figures: Mapping[str, Any]
) -> None:
    """Write `result.json`, which marks the stage as finished."""
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
