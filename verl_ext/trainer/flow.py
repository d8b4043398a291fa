"""Counts for the flow monitor: what goes into veRL's replay buffer and what comes out (veRL 0.9.1)."""

from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer

from verl_ext.trainer.flow_counters import COUNTERS_FILE, FlowCounters


class FlowMixin(PPOTrainer):
    """Wraps veRL's buffer in `ObservedBuffer` and writes the counters during the run."""

    base_mode: str  # veRL's own name of the mode

    def _build_replay_buffer(self) -> Any:
        config = self.config
        sampler = config.trainer.v1.sampler
        threshold = sampler.max_off_policy_threshold if sampler.max_off_policy_strategy == "drop" else None
        filter_groups = config.algorithm.get("filter_groups") or {}
        storage = (config.transfer_queue.get("backend") or {}).get("SimpleStorage") or {}
        self._flow = FlowCounters(
            path=Path(config.run.dir) / COUNTERS_FILE,
            mode=self.base_mode,
            rollouts_per_prompt=config.actor_rollout_ref.rollout.n,
            # veRL counts the versions that a sample spans, including its own.
            behind_limit=None if threshold is None else threshold - 1,
            capacity=storage.get("total_storage_size"),
            filters=bool(filter_groups.get("enable") or sampler.get("sync_refill_failed_groups")),
        )
        return ObservedBuffer(super()._build_replay_buffer(), self._flow)

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: D102 - veRL's own hook
        with self._flow.writing(self.config.flow.every_s):
            super().fit(agent_loop_manager)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        groups = super()._submit_batch_to_rollout(batch)
        self._flow.submitted(groups)
        return groups

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        groups = super()._add_prompts_to_generate(num_prompts)
        self._flow.replaced(groups)
        return groups


class ObservedBuffer:
    """veRL's replay buffer. Counts the calls that wait for samples and passes everything else on."""

    def __init__(self, buffer: Any, counters: FlowCounters) -> None:
        self._buffer = buffer
        self._counters = counters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A batch of `batch_size` groups, and veRL's metrics of evictions."""
        with self._counters.sampling(partition_id, batch_size, global_steps):
            batch, metrics = self._buffer.sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
            self._counters.sampled(partition_id, batch_size, metrics, batch)
        return batch, metrics

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, Any]]:
        """The groups that can be sampled, once there are `target_count`, and the same metrics."""
        with self._counters.sampling(partition_id, target_count, global_steps):
            found, metrics = self._buffer.wait_for_sampleable(global_steps, partition_id, target_count)
            self._counters.sampled(partition_id, 0, metrics, None)
        return found, metrics
