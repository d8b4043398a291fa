"""A stage's result for the loop: `result.json`, written last. A stage without it has not finished."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drzero.ops.artefacts import announce
from drzero.ops.files import atomic_write

RESULT, REPORT = "result.json", "report.json"
FOUND = "questions.jsonl"
DEMONSTRATIONS, LEFT_OUT = "demonstrations.jsonl", "left_out.jsonl"  # of a warm start


@dataclass(frozen=True)
class StageResult:
    """Outputs by name, tokens spent, and figures for the loop's table."""

    outputs: dict[str, Path]
    tokens: int
    figures: dict[str, Any]


def write_result(
    config: DictConfig, outputs: Mapping[str, Path], tokens: int, figures: Mapping[str, Any]
) -> None:
    """Write `result.json`, which marks the stage as finished."""
    folder = Path(config.run.dir)
    paths = {name: str(path) for name, path in outputs.items()}
    record = {"outputs": paths, "tokens": tokens, "figures": dict(figures)}
    atomic_write(folder / RESULT, json.dumps(record, indent=1))
    announce(folder / RESULT)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `report.json`, for readers and for the run's page."""
    atomic_write(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    announce(folder / REPORT)


def read_result(folder: Path) -> StageResult | None:
    """The result in a run folder. None if the stage has not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    outputs = {name: Path(output) for name, output in record["outputs"].items()}
    return StageResult(outputs, int(record["tokens"]), record["figures"])
