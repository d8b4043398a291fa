"""veRL's bypass-mode policy loss, also for a micro-batch in which no token counts (veRL 0.9.1).

Padding rows and rows spoiled by a failed service stay in a batch with a mask of zeros. veRL's own loss
refuses a micro-batch of only such rows ("response_mask must contain at least one valid token"). This one
(`actor_rollout_ref.actor.policy_loss.loss_mode=drzero_bypass_mode`) gives it a loss of zero. The test
`test_veRLs_own_loss_still_refuses_a_micro_batch_without_a_token` fails when this can go.
"""

from typing import Any

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import ActorConfig

BYPASS_MODE = "drzero_bypass_mode"


@register_policy_loss(BYPASS_MODE)
def bypass_mode_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: DictConfig | ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of a micro-batch and its metrics. All tensors are [rows, tokens].

    Without a counting token the loss is zero but part of the graph, and the metrics have the usual names.
    """
    if not response_mask.any():
        log_prob = log_prob.masked_fill(~response_mask.bool(), 0.0)
        old_log_prob, advantages = torch.zeros_like(log_prob), torch.zeros_like(log_prob)
        response_mask = torch.ones_like(response_mask)
    return get_policy_loss_fn("bypass_mode")(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
