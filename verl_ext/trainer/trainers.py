"""Our trainer modes: veRL's V1 trainers with group-relative advantages over the rows that count (veRL 0.9.1).

A mode is chosen by `trainer.v1.trainer_mode`, which the config group `mode/` derives from a stage's `method`:
`drzero_hrpo_sync` for the challenger, whose rewards are compared among questions of the same hop count;
`drzero_grpo_sync` for the solver, whose rewards are compared among the answers to one question.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from verl_ext.method.grpo import group_advantages
from verl_ext.method.hrpo import hop_advantages
from verl_ext.trainer.observed_trainer import ObservedTrainer
from verl_ext.trainer.step_metrics import challenger_metrics, solver_metrics
from verl_ext.trainer.step_rows import StepRow


@dataclass(frozen=True)
class Method:
    """How rewards are compared."""

    name: str
    group: Callable[[StepRow], Hashable]
    advantages: Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.float64]]
    """From rewards, group labels and whether each row counts."""
    metrics: Callable[[list[StepRow]], dict[str, float]]


HRPO = Method("hrpo", lambda row: row.hop, hop_advantages, challenger_metrics)
GRPO = Method("grpo", lambda row: row.prompt, group_advantages, solver_metrics)


class GroupRelativeTrainer(ObservedTrainer):
    """Advantages within groups; spoiled and padding rows are left out of the groups and of the loss."""

    method: Method

    def __init__(self, config: DictConfig) -> None:
        if config.algorithm.use_kl_in_reward:
            name = self.method.name.upper()
            raise ValueError(f"{name} compares whole rewards: set algorithm.use_kl_in_reward=false")
        super().__init__(config)

    def _group(self, row: StepRow) -> Hashable:
        return self.method.group(row)

    def _method_metrics(self, rows: list[StepRow]) -> dict[str, float]:
        return self.method.metrics(rows)

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        fields = ["response_mask", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        masks, scores = data["response_mask"].unbind(), data["rm_scores"].unbind()
        counts = np.array([row.counts for row in rows])
        groups: list[Any] = [self._group(row) for row in rows]
        advantages = self.method.advantages(
            [float(row_scores.sum()) for row_scores in scores], groups, counts
        )
        # Rows that do not count must not enter the loss's mean over tokens either.
        masks = [mask * int(row_counts) for mask, row_counts in zip(masks, counts, strict=True)]
        per_token = [float(advantage) * mask for advantage, mask in zip(advantages, masks, strict=True)]
        columns = {
            "advantages": _nested([row.float() for row in per_token]),
            "returns": _nested([row.float() for row in per_token]),
            "response_mask": _nested(masks),
            "loss_mask": _nested(masks),
        }
        counted = [group for group, row_counts in zip(groups, counts, strict=True) if row_counts]
        prefix = f"drzero/{self.method.name}"
        metrics[f"{prefix}/lone_groups"] = sum(counted.count(group) == 1 for group in set(counted))
        metrics[f"{prefix}/advantage_abs_mean"] = (
            float(np.abs(advantages[counts]).mean()) if counts.any() else 0.0
        )
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(columns, batch_size=len(batch)),
        )


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


# One class per pair of method and veRL mode. An asynchronous challenger is off-policy: preflight refuses it
# unless the config allows it.


class HrpoTrainer(GroupRelativeTrainer):
    """For the challenger: questions of the same hop count are compared."""

    method = HRPO


class GrpoTrainer(GroupRelativeTrainer):
    """For the solver: answers to the same question are compared."""

    method = GRPO


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


@register_trainer("drzero_grpo_sync")
class GrpoSync(GrpoTrainer, PPOTrainerSync):
    """GRPO, every rollout sampled by the current policy."""

    base_mode = "sync"


@register_trainer("drzero_grpo_colocate_async")
class GrpoColocateAsync(GrpoTrainer, PPOTrainerColocateAsync):
    """GRPO with rollouts that may be a step old; the ratio's clip bounds their effect."""

    base_mode = "colocate_async"


@register_trainer("drzero_grpo_separate_async")
class GrpoSeparateAsync(GrpoTrainer, PPOTrainerSeparateAsync):
    """GRPO with rollouts on devices of their own."""

    base_mode = "separate_async"
