"""Rollout dump: one JSON line per rollout of a step, with turns, reward and solver attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from verl_ext.artefacts import announce
from verl_ext.trainer.step_rows import StepRow


def dump_rows(rows: Sequence[StepRow], step: int, target: Path) -> None:
    """Write a step's real rows to `target`, completely or not at all, and announce it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")  # one name, so that a resumed run finds what a kill left
    with partial.open("w", encoding="utf-8") as file:
        for row in sorted((row for row in rows if not row.padding), key=lambda row: row.key):
            record = {
                "step": step,
                "key": row.key,
                "hop": row.hop,
                **{name: row.extra_info.get(name) for name in ("doc_id", "document", "question")},
                "trajectory": row.trajectory.to_dict(),
                "token_drift": row.token_drift,
                "reward": {name: value for name, value in row.reward.items() if name != "attempts"},
                "attempts": json.loads(row.reward.get("attempts", "[]")),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    announce(target)
