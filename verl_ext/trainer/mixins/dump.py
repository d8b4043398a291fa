"""Rollout dump: one JSON line per rollout of a step, with turns, reward and solver attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer

from verl_ext.artefacts import announce
from verl_ext.trainer.step_rows import StepRow


class DumpMixin(PPOTrainer):
    """Writes `step_NNNN.jsonl` before the update, so every checkpoint has the dumps of all its steps."""

    def _dump(self, rows: Sequence[StepRow], folder: Path) -> None:
        part = f"_{self.local_trigger_step}" if self.parameter_sync_step > 1 else ""
        target = folder / f"step_{self.global_steps:04d}{part}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")  # one name, so that a resumed run finds what a kill left
        with partial.open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: row.key):
                if not row.padding:
                    file.write(json.dumps(_dump_record(row, self.global_steps), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        announce(target)

    def _log_rollout_data(
        self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str
    ) -> None:
        """Write nothing in veRL's place: its dump has flat text and comes after the checkpoint."""


def _dump_record(row: StepRow, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "key": row.key,
        "hop": row.hop,
        **{name: row.extra_info.get(name) for name in ("doc_id", "document", "question")},
        "trajectory": row.trajectory.to_dict(),
        "token_drift": row.token_drift,
        "reward": {name: value for name, value in row.reward.items() if name != "attempts"},
        "attempts": json.loads(row.reward.get("attempts", "[]")),
    }
