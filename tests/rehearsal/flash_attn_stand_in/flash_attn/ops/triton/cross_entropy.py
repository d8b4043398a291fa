"""flash-attn 2.8.3's cross-entropy in plain PyTorch."""

import torch


def cross_entropy_loss(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and z-losses in float32, by row."""
    losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return losses, torch.zeros_like(losses)
