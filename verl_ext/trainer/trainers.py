"""Trainer modes: veRL's V1 trainers with group-relative advantages over the rows that count (veRL 0.9.1).

`mode/` sets `trainer.v1.trainer_mode`: `drzero_hrpo_sync` for the challenger, `drzero_grpo_sync` for the
solver, `drzero_environment_sync` for any other environment, and each also with veRL's asynchronous modes.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

from drzero.ops.notices import ALARM_KIND
from verl_ext.method.advantages import call_advantages, group_advantages, hop_advantages, hop_balanced
from verl_ext.trainer import step_metrics
from verl_ext.trainer.collapse import ALARM, CollapseWatch, collapse_metrics
from verl_ext.trainer.flow import FlowMixin
from verl_ext.trainer.progress import ProgressMixin
from verl_ext.trainer.step_rows import (
    StepRow,
    dump_rows,
    log_trajectories,
    read_log_probs,
    read_rows,
    records,
)


@dataclass(frozen=True)
class Method:
    """How rewards are compared."""

    name: str
    group: Callable[[StepRow], Hashable]  # the label of the rows to compare
    advantages: Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.float64]]
    """From rewards, group labels and whether each row counts."""
    metrics: Callable[[list[StepRow]], dict[str, float]]
    validation: Callable[[dict[str, list[Any]], int], dict[str, float]] = step_metrics.validation_metrics


HRPO = Method(
    "hrpo",
    lambda row: row.hop,
    hop_advantages,
    step_metrics.challenger_metrics,
    step_metrics.challenger_validation,
)
GRPO = Method("grpo", lambda row: row.prompt, group_advantages, step_metrics.solver_metrics)
ENVIRONMENT = Method(
    "environment",
    lambda row: row.prompt,
    group_advantages,
    step_metrics.environment_metrics,
    step_metrics.environment_validation,
)


class TooManyFailures(RuntimeError):
    """Failed services spoiled so many rollouts that training or validating on the rest would mislead."""


class GroupRelativeTrainer(ProgressMixin, FlowMixin):
    """Advantages within groups. Spoiled and padding rows are in no group and not in the loss."""

    method: Method

    def __init__(self, config: DictConfig) -> None:
        if config.algorithm.use_kl_in_reward:
            name = self.method.name.upper()
            raise ValueError(f"{name} compares whole rewards: set algorithm.use_kl_in_reward=false")
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        self._collapse_watch = CollapseWatch()
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device == "cpu":
            import ray

            from verl_ext.rollout.cpu_worker import CpuActorRolloutRefWorker

            for role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CpuActorRolloutRefWorker)

    @property
    def _expected_rollouts(self) -> int:
        """Of one batch. An asynchronous mode trains on several batches a step."""
        rollouts = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return int(rollouts // self.parameter_sync_step)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Whole batches. veRL counts rows, and would update once more on the further rows of episodes."""
        return math.lcm(super()._get_required_batch_multiple(dp_size), self._expected_rollouts)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Update as often as the config says, however many rows the episodes have."""
        actor = self.config.actor_rollout_ref.actor
        planned = actor.ppo_mini_batch_size
        actor.ppo_mini_batch_size = planned * (len(batch) // self._expected_rollouts)
        try:
            return super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size = planned

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Run veRL's step, then check for collapse before the save: the step may be the last."""
        batch = super().step(metrics, timing_raw)
        self._watch_for_collapse(batch, metrics)
        return batch

    def _watch_for_collapse(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        rows = read_rows(batch)
        groups = [self.method.group(row) for row in rows]
        metrics |= collapse_metrics(rows, groups, read_log_probs(batch, rows))
        for alarm in self._collapse_watch.add_step(metrics):
            text = f"step {self.global_steps}: {alarm}"
            self._events.add(ALARM_KIND, "trainer", text, name=alarm.name, step=self.global_steps)
        active = self._collapse_watch.active
        if self._collapse_watch.window_full:
            metrics["drzero/collapse/alarms"] = len(active)
            metrics |= {f"{ALARM}{name}": 1.0 for name in active}
        # A last step needs no early end.
        if active and self.config.collapse.policy == "stop" and self.global_steps < self.total_training_steps:
            self._collapsed = "; ".join(map(str, active.values()))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Raises TooManyFailures."""
        step = self.global_steps
        self._heartbeat.beat(step, "advantage")
        rows = read_rows(batch)
        if folder := self.config.trainer.rollout_data_dir:
            # Before the update, so that the dump is complete at every checkpoint and early end.
            part = f"_{self.local_trigger_step}" if self.parameter_sync_step > 1 else ""
            dump_rows(rows, step, Path(folder) / f"step_{step:04d}{part}.jsonl")
        real = step_metrics.count_rollouts([row for row in rows if not row.padding])
        good = step_metrics.count_rollouts([row for row in rows if row.counts])
        self._flow.judged(self._expected_rollouts, real, good)
        causes = [row.reward.get("reason_invalid") for row in rows if not row.padding and not row.counts]
        self._check_failed_share(f"step {step}", self._expected_rollouts, good, causes)
        if not good:
            raise TooManyFailures(f"step {step}: no rollout is left to learn from, because: {causes[:3]}")
        return self._advantages(batch, metrics, rows)

    def _log_rollout_data(self, batch: KVBatchMeta, *_: Any) -> None:
        """Log a table to wandb instead of veRL's dump, which has flat text and comes after the checkpoint."""
        # Offline, the table would only repeat the dumps.
        if "wandb" in self.logger.logger and os.environ.get("WANDB_API_KEY"):
            log_trajectories(self.logger, records(read_rows(batch), self.global_steps), self.global_steps)

    def _check_failed_share(self, what: str, expected: int, good: int, causes: Sequence[str | None]) -> None:
        """`causes` has one entry per invalid row. The other missing rollouts have raised."""
        limit = self.config.run.max_failed_share
        if expected - good > limit * expected:
            raise TooManyFailures(
                f"{what}: {1 - good / expected:.0%} of {expected} rollouts were spoiled "
                f"(run.max_failed_share={limit:.0%}). {expected - good - len(causes)} raised in the agent "
                f"loop (see trainer.log), {len(causes)} are invalid, the first because: {causes[:3]}. Rerun "
                "to resume from the last checkpoint once the service is up again."
            )

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        fields = ["response_mask", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        masks, scores = data["response_mask"].unbind(), data["rm_scores"].unbind()
        rewards = [float(row_scores.sum()) for row_scores in scores]
        advantages, per_token, masks = self._per_token(rewards, masks, rows)
        counted = {
            row.rollout: (self.method.group(row), abs(advantage))
            for row, advantage in zip(rows, advantages, strict=True)
            if row.counts
        }
        prefix, sizes = f"drzero/{self.method.name}", Counter(group for group, _ in counted.values())
        metrics[f"{prefix}/lone_groups"] = sum(size == 1 for size in sizes.values())
        metrics[f"{prefix}/advantage_abs_mean"] = step_metrics.mean([size for _, size in counted.values()])
        columns = {"advantages": per_token, "returns": per_token, "response_mask": masks, "loss_mask": masks}
        nested = {name: torch.nested.as_nested_tensor(c, layout=torch.jagged) for name, c in columns.items()}
        fields = TensorDict(nested, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _per_token(
        self, rewards: Sequence[float], masks: Sequence[torch.Tensor], rows: Sequence[StepRow]
    ) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
        """Each row's advantage, the advantages of its tokens, and its mask in the loss."""
        groups = [self.method.group(row) for row in rows]
        advantages = self._compared(rewards, groups, rows)
        if self.config.get("balance_hops"):  # a key of the solver stage
            advantages = hop_balanced(advantages, [row.hop for row in rows])
        # Rows that do not count must not enter the loss's mean over tokens.
        masks = [mask * int(row.counts) for mask, row in zip(masks, rows, strict=True)]
        pairs = zip(advantages, masks, strict=True)
        per_token = [float(advantage) * mask.float() for advantage, mask in pairs]
        self._pay_by_call(per_token, rows, groups)
        return advantages.tolist(), per_token, masks

    def _compared(
        self, rewards: Sequence[float], groups: Sequence[Any], rows: Sequence[StepRow]
    ) -> npt.NDArray[np.float64]:
        """Each row's advantage. All branches of a rollout share one, and are compared once."""
        first: dict[str, int] = {}
        for index, row in enumerate(rows):
            if row.counts:
                first.setdefault(row.rollout, index)
        judged = np.array([row.counts and first[row.rollout] == index for index, row in enumerate(rows)])
        advantages = self.method.advantages(rewards, groups, judged)
        return np.array([advantages[first[row.rollout]] if row.counts else 0.0 for row in rows])

    def _pay_by_call(
        self, per_token: Sequence[torch.Tensor], rows: Sequence[StepRow], groups: Sequence[Any]
    ) -> None:
        """Replace the advantages where an agent gave a reward for each of its model calls."""
        counting = [(row, group) for row, group in zip(rows, groups, strict=True) if row.counts]
        paid = {
            row.rollout: (row.agent["rewards"], group) for row, group in counting if "rewards" in row.agent
        }
        if not paid:
            return
        by_call = dict(zip(paid, call_advantages(*zip(*paid.values(), strict=True)), strict=True))
        for tokens, row in zip(per_token, rows, strict=True):
            if row.counts and row.rollout in by_call:
                for number, (start, stop) in row.agent["places"].items():
                    tokens[start:stop] = float(by_call[row.rollout][int(number)])

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **named)
        rows = read_rows(batch)
        metrics |= step_metrics.rollout_metrics(rows, self._expected_rollouts * self.parameter_sync_step)
        metrics |= self.method.metrics(rows)
        print(step_metrics.progress_line(metrics, self.global_steps, self.total_training_steps), flush=True)
        if self._ends_because:  # the last hook that can end veRL's loop
            self._end_after(self.global_steps)

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """Raises TooManyFailures."""
        infos = reward_extra_infos_dict
        expected = sum((expected_acc_counts or {}).values())
        metrics = self.method.validation(infos, expected)
        print(step_metrics.validation_line(metrics, self.global_steps), flush=True)
        good = step_metrics.valid_rows(infos)
        causes = [
            infos["reason_invalid"][row] for row, valid in enumerate(infos.get("valid", ())) if not valid
        ]
        self._check_failed_share(f"validation after step {self.global_steps}", expected, len(good), causes)
        if good:
            # veRL averages every column it gets, so flags and hop counts are left out.
            names = [name for name in ("reward", "f1", "success") if name in infos]
            kept = {name: [float(infos[name][row]) for row in good] for name in names}
            sources, uids, turns = (
                [column[row] for row in good] for column in (data_sources, sample_uids, sample_turns)
            )
            metrics |= super()._val_metrics_update(sources, uids, kept, turns)
        return metrics


# Preflight refuses an asynchronous challenger, which is off-policy, unless the config allows it.
for _method, _mode in product((HRPO, GRPO, ENVIRONMENT), ("sync", "colocate_async", "separate_async")):
    _name, _bases = f"drzero_{_method.name}_{_mode}", (GroupRelativeTrainer, get_trainer_cls(_mode))
    register_trainer(_name)(type(_name, _bases, {"method": _method, "base_mode": _mode}))
