"""veRL's bypass-mode policy loss, with a loss of zero where no token counts (veRL 0.9.1).

veRL's own refuses a micro-batch of only padding and spoiled rows. The test
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
    """All tensors are [rows, tokens]. Without a counting token the loss is zero but part of the graph."""
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
