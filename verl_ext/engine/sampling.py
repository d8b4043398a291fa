"""Sampling: from a batch of logits to one token id per row, with its log-probability.

It is veRL's: `log_softmax(logits / temperature)` over the full vocabulary, `log_softmax(logits)` for greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEAST = 1e-6  # smallest temperature and top-p: float32 cannot hold much smaller ones
MOST_TOP = 20  # limit for `top_log_probs`, as in OpenAI's API

TopLogProbs = list[tuple[int, float]]  # the most probable ids with their log-probabilities, best first


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Raises ValueError for a value out of range.

    `temperature` 0 is greedy. `top_p` 1 and `top_k` 0 or -1 filter nothing. Top-k applies before top-p.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        temperature, least = self.temperature, f"{LEAST:g}"
        tempered = temperature == 0 or LEAST <= temperature <= 1 / LEAST
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", temperature, tempered, f"0 (greedy), or from {least} to {1 / LEAST:g}"),
            ("top_p", self.top_p, LEAST <= self.top_p <= 1, f"from {least} to 1"),
            ("logprobs", self.top_log_probs, 0 <= self.top_log_probs <= MOST_TOP, f"from 0 to {MOST_TOP}"),
            ("top_k", self.top_k, -1 <= self.top_k < 1 << 31, "from 1 to 2^31 - 1, or 0 or -1 for no limit"),
        )
        for name, value, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name} is {value}; it must be {allowed}")

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p restricts the draw."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row of `logits` (batch, vocabulary) by `uniforms` in [0, 1), whatever the batch.

    Returns (ids, log_probs), both (batch,). A row of NaN gives an arbitrary id with log-probability NaN.
    """
    scaled = logits.float()
    if any(p.temperature not in (0, 1) for p in params):
        scales = torch.tensor(
            [p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device
        )
        scaled = scaled / scales[:, None]
    probs = torch.softmax(scaled, dim=-1)
    # By the logits: two that differ can have the same rounded probability.
    ids = logits.argmax(dim=-1)
    draws = torch.tensor(list(uniforms), dtype=torch.float32, device=logits.device)

    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not p.filters]
    if len(plain) == len(params):  # the usual case in training: no copy of the rows
        ids = _invert_cdf(probs, draws)
    elif plain:
        ids[plain] = _invert_cdf(probs[plain], draws[plain])
    filtered = [i for i, p in enumerate(params) if p.filters]
    if filtered:
        chosen = [params[i] for i in filtered]
        ids[filtered] = _sample_filtered(logits[filtered], probs[filtered], chosen, draws[filtered])
    # A sampled probability is never 0, so its logarithm is exact enough.
    return ids, probs.gather(1, ids[:, None]).squeeze(1).log()


def top_log_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[TopLogProbs]:
    """The most probable ids of each row, as many as its parameters ask for."""
    tops: list[TopLogProbs] = [[] for _ in params]
    for row, asked in enumerate(params):
        if asked.top_log_probs:
            log_probs = torch.log_softmax(logits[row].float() / (asked.temperature or 1.0), dim=-1)
            best = log_probs.topk(min(asked.top_log_probs, len(log_probs)))
            tops[row] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tops


def _sample_filtered(
    logits: torch.Tensor, probs: torch.Tensor, params: Sequence[SamplingParams], draws: torch.Tensor
) -> torch.Tensor:
    vocabulary = probs.shape[1]
    limits = [p.top_k if p.top_k > 0 else vocabulary for p in params]
    order = logits.topk(min(max(limits), vocabulary), dim=-1).indices
    descending = probs.gather(1, order)
    rank = torch.arange(descending.shape[1], device=probs.device)
    descending = descending * (rank < torch.tensor(limits, device=probs.device)[:, None])
    descending = descending / descending.sum(dim=-1, keepdim=True)
    mass_before = descending.cumsum(dim=-1) - descending
    top_p = torch.tensor([p.top_p for p in params], device=probs.device)[:, None]
    # The first id always stays: the mass before it is 0.
    kept = descending * (mass_before < top_p)
    return order.gather(1, _invert_cdf(kept, draws)[:, None]).squeeze(1)


def _invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index at which the cumulative `weights` (batch, n) pass the share `draws` of their total."""
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1]
    # Strictly below the total even after rounding, so that an id of weight 0 is never drawn.
    threshold = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, threshold[:, None], right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)  # only a row of NaN reaches past the end
