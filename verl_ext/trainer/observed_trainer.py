"""veRL's trainer with our supervision: one mixin per concern, in `verl_ext/trainer/mixins/` (veRL 0.9.1).

    heartbeats   which phase the trainer is in
    stop_time    the run ends at a saved step before its stop time
    metrics      our figures, the progress line, collapse alarms
    failures     a step that failing services have spoiled stops the run
    checkpoints  pruning that always leaves a whole checkpoint
    dump         every rollout with its turns, reward and solver attempts
    flow         counters of the replay buffer

Each overrides hooks of veRL's `PPOTrainer` and calls the next one, so any of veRL's V1 modes can carry them.
How rewards become advantages is defined by the subclass (`verl_ext.trainer.trainers`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta

from verl_ext.trainer.mixins.checkpoints import CheckpointMixin
from verl_ext.trainer.mixins.dump import DumpMixin
from verl_ext.trainer.mixins.flow import FlowMixin
from verl_ext.trainer.mixins.metrics import MetricsMixin
from verl_ext.trainer.mixins.stop_time import StopTimeMixin
from verl_ext.trainer.step_rows import StepRow, read_rows


# Order matters where mixins share a hook: the stop time decides first (whether to save, whether to validate),
# then the heartbeat that it inherits from logs what is really done.
class ObservedTrainer(StopTimeMixin, MetricsMixin, CheckpointMixin, DumpMixin, FlowMixin):
    """All mixins together, and the worker for a CPU."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device == "cpu":
            import ray

            from verl_ext.rollout.cpu_worker import CpuActorRolloutRefWorker

            for role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CpuActorRolloutRefWorker)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Count and dump the step's rows, then write their advantages in veRL's place."""
        self._heartbeat.beat(self.global_steps, "advantage")
        rows = read_rows(batch)
        real, good = sum(not row.padding for row in rows), sum(row.counts for row in rows)
        self._flow.judged(self._expected_rollouts, real, good)
        self._stop_on_failures(rows)
        if folder := self.config.trainer.rollout_data_dir:
            self._dump(rows, Path(folder))
        return self._advantages(batch, metrics, rows)

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        """Write the advantages of a batch."""
        raise NotImplementedError
