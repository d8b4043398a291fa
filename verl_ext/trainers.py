"""Our trainer modes: veRL's V1 trainers with HRPO advantages, phase heartbeats and honest accounting.

The mixins override hooks of veRL's `PPOTrainer` and nothing else, so any of its modes can carry them (veRL
0.9.1). A mode is chosen by `trainer.v1.trainer_mode`, which the config group `mode/` sets: `drzero_hrpo_sync`
for the challenger, its advantages normalised among questions of the same hop count.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from verl_ext.heartbeat import Heartbeat
from verl_ext.method.hrpo import hop_advantages
from verl_ext.step_metrics import challenger_metrics, progress_line, rollout_metrics
from verl_ext.step_rows import StepRow, read_rows


class TooManyFailures(RuntimeError):
    """Failed services spoiled so many rollouts of a step that training on the rest would mislead."""


class ObservedTrainer(PPOTrainer):
    """Heartbeats, our metrics, our rollout dump, and a stop when services fail; the CPU worker on a CPU."""

    base_mode: str
    """veRL's own name of the mode, which its base classes branch on."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        self._heartbeat = Heartbeat(Path(config.run.dir) / "heartbeats.jsonl")
        self._heartbeat.beat(0, "start-up")
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device == "cpu":
            import ray

            from verl_ext.cpu_worker import CpuActorRolloutRefWorker

            for role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CpuActorRolloutRefWorker)

    # Phases -------------------------------------------------------------------------------------------------

    def on_sample_begin(self) -> None:  # noqa: D102 - veRL's own hooks, here and below
        self._heartbeat.beat(self.global_steps, "rollout")
        super().on_sample_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "log-probs")
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "advantage")
        rows = read_rows(batch)
        self._stop_on_failures(rows)
        return self._advantages(batch, metrics, rows)

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "update")
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        self._heartbeat.beat(self.global_steps, "save")
        super()._save_checkpoint()

    def on_step_end(self) -> None:  # noqa: D102
        self._heartbeat.beat(self.global_steps, "weight-sync")
        super().on_step_end()

    def on_validate_begin(self) -> None:  # noqa: D102
        self._heartbeat.beat(self.global_steps, "validation")
        super().on_validate_begin()

    # Accounting ---------------------------------------------------------------------------------------------

    @property
    def _expected_rollouts(self) -> int:
        """Rollouts of one batch; an asynchronous mode trains on several batches a step."""
        rollouts = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return int(rollouts // self.parameter_sync_step)

    def _stop_on_failures(self, rows: list[StepRow]) -> None:
        """Raise `TooManyFailures` above the configured share, naming the first causes."""
        good = sum(row.counts for row in rows)
        share = 1 - good / self._expected_rollouts
        limit = self.config.run.max_failed_share
        if share > limit:
            causes = [
                str(row.reward.get("reason_invalid")) for row in rows if not row.padding and not row.counts
            ]
            lost = self._expected_rollouts - sum(not row.padding for row in rows)
            raise TooManyFailures(
                f"step {self.global_steps}: {share:.0%} of {self._expected_rollouts} rollouts were spoiled "
                f"(run.max_failed_share={limit:.0%}). {lost} raised in the agent loop (see trainer.log), "
                f"{len(causes)} are invalid, the first because: {causes[:3]}. Rerun to resume from the last "
                "checkpoint once the service is up again."
            )

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
        metrics.update(rollout_metrics(rows, self._expected_rollouts * self.parameter_sync_step))
        if any("integrity" in row.reward for row in rows):
            metrics.update(challenger_metrics(rows))
        print(progress_line(metrics, global_steps, self.total_training_steps), flush=True)

    def _log_rollout_data(
        self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str
    ) -> None:
        """Dump the step's rollouts with turns, reward and solver attempts: veRL's own dump has flat text."""
        target = Path(rollout_data_dir) / f"step_{self.global_steps:04d}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for row in sorted(read_rows(batch), key=lambda row: row.key):
                if not row.padding:
                    file.write(json.dumps(_dump_record(row, self.global_steps), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)


class HrpoTrainer(ObservedTrainer):
    """HRPO advantages (`verl_ext.method.hrpo`): rows grouped by hop, spoiled and padding rows left out."""

    def __init__(self, config: DictConfig) -> None:
        if config.algorithm.use_kl_in_reward:
            raise ValueError("HRPO compares whole rewards: set algorithm.use_kl_in_reward=false")
        super().__init__(config)

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        fields = ["response_mask", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        masks, scores = data["response_mask"].unbind(), data["rm_scores"].unbind()
        counts = np.array([row.counts for row in rows])
        advantages = hop_advantages(
            rewards=[float(row_scores.sum()) for row_scores in scores],
            hops=[row.hop for row in rows],
            valid=counts,
        )
        # A row that does not count must not count in the loss's mean over tokens either.
        masks = [mask * int(row_counts) for mask, row_counts in zip(masks, counts, strict=True)]
        per_token = [float(advantage) * mask for advantage, mask in zip(advantages, masks, strict=True)]
        columns = {
            "advantages": _nested([row.float() for row in per_token]),
            "returns": _nested([row.float() for row in per_token]),
            "response_mask": _nested(masks),
            "loss_mask": _nested(masks),
        }
        metrics["drzero/hrpo/lone_groups"] = _lone_groups(rows)
        metrics["drzero/hrpo/advantage_abs_mean"] = (
            float(np.abs(advantages[counts]).mean()) if counts.any() else 0.0
        )
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(columns, batch_size=len(batch)),
        )


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _lone_groups(rows: list[StepRow]) -> int:
    hops = [row.hop for row in rows if row.counts]
    return sum(hops.count(hop) == 1 for hop in set(hops))


def _dump_record(row: StepRow, step: int) -> dict[str, Any]:
    reward = {name: value for name, value in row.reward.items() if name != "attempts"}
    return {
        "step": step,
        "key": row.key,
        "hop": row.hop,
        "doc_id": row.extra_info.get("doc_id"),
        "document": row.extra_info.get("document"),
        "trajectory": row.trajectory.to_dict(),
        "token_drift": row.token_drift,
        "reward": reward,
        "attempts": json.loads(row.reward.get("attempts", "[]")),
    }


# One class per pair of method and veRL mode; an asynchronous challenger is off-policy and is refused at
# compose time unless the config says otherwise.


@register_trainer("drzero_hrpo_sync")
class HrpoSync(HrpoTrainer, PPOTrainerSync):
    """HRPO, strictly on-policy."""

    base_mode = "sync"


@register_trainer("drzero_hrpo_colocate_async")
class HrpoColocateAsync(HrpoTrainer, PPOTrainerColocateAsync):
    """HRPO with rollouts that may be a step old."""

    base_mode = "colocate_async"


@register_trainer("drzero_hrpo_separate_async")
class HrpoSeparateAsync(HrpoTrainer, PPOTrainerSeparateAsync):
    """HRPO with rollouts on devices of their own."""

    base_mode = "separate_async"
