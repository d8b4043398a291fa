"""Metrics: our figures next to veRL's, a progress line a step, and the collapse alarms."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from verl_ext.trainer.collapse import CollapseWatch, collapse_metrics
from verl_ext.trainer.mixins.failures import FailureShareMixin
from verl_ext.trainer.step_metrics import (
    progress_line,
    rollout_metrics,
    valid_rows,
    validation_line,
    validation_metrics,
)
from verl_ext.trainer.step_rows import StepRow, read_log_probs, read_rows


class MetricsMixin(FailureShareMixin):
    """Logs each step and validation, over the rows that no failed service has spoiled."""

    def __init__(self, config: DictConfig) -> None:
        self._collapse_watch = CollapseWatch()
        super().__init__(config)

    def _group(self, row: StepRow) -> Hashable:
        """The label of the rows that a row's reward is compared with."""
        raise NotImplementedError

    def _method_metrics(self, rows: list[StepRow]) -> dict[str, float]:
        """The metrics of this training method for one step."""
        raise NotImplementedError

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        rows = read_rows(batch)
        metrics |= rollout_metrics(rows, self._expected_rollouts * self.parameter_sync_step)
        metrics |= self._method_metrics(rows)
        groups = [self._group(row) for row in rows]
        metrics |= collapse_metrics(rows, groups, read_log_probs(batch, rows))
        alarms = self._collapse_watch.add_step(metrics)
        if self._collapse_watch.window_full:
            metrics["drzero/collapse/alarms"] = len(self._collapse_watch.active)
        print(progress_line(metrics, global_steps, self.total_training_steps), flush=True)
        for alarm in alarms:
            print(f"step {global_steps}: {alarm}", flush=True)

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """veRL's validation metrics and ours, both without the rows that a failed service has spoiled.

        Raises TooManyFailures above the configured share; a rerun repeats the validation.
        """
        infos = reward_extra_infos_dict
        expected = sum((expected_acc_counts or {}).values())
        metrics = validation_metrics(infos, expected)
        print(validation_line(metrics, self.global_steps), flush=True)
        good = valid_rows(infos)
        causes = [
            infos["reason_invalid"][row] for row, valid in enumerate(infos.get("valid", ())) if not valid
        ]
        self._check_failed_share(f"validation after step {self.global_steps}", expected, len(good), causes)
        if good:
            # veRL averages every column it is given: flags and hop counts are left out.
            kept = {name: [infos[name][row] for row in good] for name in ("reward", "f1")}
            sources, uids, turns = (
                [column[row] for row in good] for column in (data_sources, sample_uids, sample_turns)
            )
            metrics |= super()._val_metrics_update(sources, uids, kept, turns)
        return metrics
