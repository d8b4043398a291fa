"""Heartbeats: one line in the run's `heartbeats.jsonl` whenever the trainer enters a phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer

from verl_ext.telemetry import Heartbeat


class HeartbeatMixin(PPOTrainer):
    """Logs each phase as it begins; the step's advantages are logged where they are computed."""

    def __init__(self, config: DictConfig) -> None:
        self._heartbeat = Heartbeat(Path(config.run.dir) / "heartbeats.jsonl")
        self._heartbeat.beat(0, "start-up")
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: D102 - veRL's own hooks, here and below
        try:
            super().fit(agent_loop_manager)
        finally:
            self._heartbeat.beat(self.global_steps, "done")

    def on_sample_begin(self) -> None:  # noqa: D102
        self._heartbeat.beat(self.global_steps, "rollout")
        super().on_sample_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "log-probs")
        return super()._compute_old_log_prob(batch, metrics)

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
