"""Records of an evaluation, and an evaluation's folder with them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.journal import Journal


def answers(
    right: Sequence[bool | int], benchmark: str = "demo_2hop", first: int = 0
) -> list[dict[str, Any]]:
    """Records of an evaluation, numbered from `first` on."""
    return [
        {"key": f"{benchmark}/{number}", "benchmark": benchmark, "right": bool(one)}
        for number, one in enumerate(right, first)
    ]


def evaluated(folder: Path, right: Sequence[int]) -> Path:
    """An evaluation as the stage leaves it; answers that are there already are kept."""
    with Journal(folder / "answers.jsonl", {"model": "m"}) as journal:
        for record in [*answers(right), *answers([1], "asked_once")][len(journal.records) :]:
            journal.append(record)
    row = {"n": len(right), "em": sum(right) / len(right), "em_low": 0.1, "em_high": 0.9}
    (folder / "report.json").write_text(json.dumps({"benchmarks": {"demo_2hop": row}}))
    return folder
