"""Sampling: from a batch of logits to one token id and its log-probability per row.

The recorded log-probability is the one veRL's actor recomputes: `log_softmax(logits / temperature)` at the
sampled id, over the *full* vocabulary, before top-k and top-p filtering; at temperature 0 (greedy)
`log_softmax(logits)`.

`sample` is a pure function of the logits and of one uniform number per row (inverse of the cumulative
distribution), so a request's own seed fixes its draws whatever else shares its batch, on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEAST = 1e-6
"""The least temperature and top-p: far below, a float32 holds neither them nor the logits divided by them."""
MOST_TOP = 20
"""Most probable ids that can be asked for, as in OpenAI's API."""

TopLogProbs = list[tuple[int, float]]
"""The most probable ids of a position, each with its log-probability, best first."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 (or -1, as SGLang and vLLM write it) filter nothing.
    Top-k applies first, then top-p to the rest, renormalised. `stop_token_ids` are added to the engine's eos
    ids. `seed` makes the draws of this request repeatable; None takes a seed from the engine's own stream.
    Of each position the `top_log_probs` most probable ids are recorded with their log-probabilities.
    Raises ValueError for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or LEAST <= self.temperature <= 1 / LEAST,
                f"0 (greedy), or from {LEAST:g} to {1 / LEAST:g}",
            ),
            ("top_p", self.top_p, LEAST <= self.top_p <= 1, f"from {LEAST:g} to 1"),
            ("logprobs", self.top_log_probs, 0 <= self.top_log_probs <= MOST_TOP, f"from 0 to {MOST_TOP}"),
            ("top_k", self.top_k, -1 <= self.top_k < 1 << 31, "from 1 to 2^31 - 1, or 0 or -1 for no limit"),
        )
        for name, value, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name} is {value}; it must be {allowed}")

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p restricts which ids can be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row of `logits` (batch, vocabulary), with `uniforms[i]` in [0, 1) deciding row i.

    Returns (ids, log_probs), both (batch,); log_probs is float32 and as the module docstring defines it. A
    row of logits that are not numbers gives an arbitrary id with log-probability NaN.
    """
    scaled = logits.float()
    if any(p.temperature not in (0, 1) for p in params):
        scales = torch.tensor(
            [p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device
        )
        scaled = scaled / scales[:, None]
    probs = torch.softmax(scaled, dim=-1)
    # By the logits themselves: two that differ can have the same rounded probability.
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
    # A sampled probability is never 0, and its logarithm is as exact as log_softmax would be.
    return ids, probs.gather(1, ids[:, None]).squeeze(1).log()


def top_log_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[TopLogProbs]:
    """Of each row the most probable ids, as many as its parameters ask for, as `sample` records them."""
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
    """Sort each row, keep its top-k, of these the smallest set that reaches top-p, and draw from that set."""
    vocabulary = probs.shape[1]
    limits = [p.top_k if p.top_k > 0 else vocabulary for p in params]
    order = logits.topk(min(max(limits), vocabulary), dim=-1).indices
    descending = probs.gather(1, order)
    rank = torch.arange(descending.shape[1], device=probs.device)
    descending = descending * (rank < torch.tensor(limits, device=probs.device)[:, None])
    descending = descending / descending.sum(dim=-1, keepdim=True)
    mass_before = descending.cumsum(dim=-1) - descending
    top_p = torch.tensor([p.top_p for p in params], device=probs.device)[:, None]
    # The first id is always kept: the mass before it is 0, whatever the rounding of the others.
    kept = descending * (mass_before < top_p)
    return order.gather(1, _invert_cdf(kept, draws)[:, None]).squeeze(1)


def _invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index where the cumulative `weights` (batch, n; need not sum to 1) pass `draws` of their total."""
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1]
    # Strictly below the total even after rounding, so that an id of weight 0 can never be drawn.
    threshold = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, threshold[:, None], right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)  # only a row of NaN reaches past the end
