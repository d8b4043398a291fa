"""Check the engine's sampler: temperature, top-p and top-k.

Ids outside the nucleus show that top-p is ignored. Pearson's chi-square test shows a greedy sampler or
another temperature. Settings are tested one by one, because engines combine them in different orders.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats

from drzero.labs.consistency.engine import Continued, Sampling
from drzero.labs.consistency.verdict import Case, Comparison, Tolerances

ENOUGH = 10.0  # the check counts if a sampler without the filter would draw this many ids outside
_LEAST_EXPECTED = 5.0  # Draws a cell of the chi-square test needs. Rarer ids share a cell.
_BEST_TOP = math.log(0.4)  # where draws tell most: neither certain nor one of thousands
_MARGIN = 0.02  # rounding of a probability: a nucleus that ends this close may differ by one id
_ADVICE = (
    "the engine's sampler: its sampling backend, parameters a proxy drops, or defaults it takes from "
    "generation_config.json"
)


SETTINGS = {
    "temperature 1": Sampling(1, 1.0),
    "temperature 0.5": Sampling(1, 0.5),
    "top-p 0.7": Sampling(1, 1.0, top_p=0.7),
    "top-k 3": Sampling(1, 1.0, top_k=3),
}
"""By name, ways to draw one id."""


@dataclass(frozen=True)
class SampledPlace:
    """A position in the ids sampled after a prompt."""

    prompt: int
    position: int


def choose_places(sampled: Sequence[Continued], count: int) -> list[SampledPlace]:
    """Positions where the engine was neither sure nor lost, at most one a prompt."""
    best = []
    for prompt, made in enumerate(sampled):
        firsts = [top[0][1] for top in made.tops] if made.tops else made.log_probs
        distances = [abs(log_prob - _BEST_TOP) for log_prob in firsts]
        position = min(range(len(distances)), key=distances.__getitem__)
        best.append((distances[position], SampledPlace(prompt, position)))
    return [place for _, place in sorted(best, key=lambda one: one[0])[:count]]


def check_sampling(
    name: str, drawn: Sequence[Sequence[int]], log_probs: Sequence[torch.Tensor], limits: Tolerances
) -> Comparison:
    """The ids drawn at each place by a setting, against Transformers' log-probabilities (vocabulary,)."""
    setting = SETTINGS[name]
    outside, had_it_been_ignored, tests = 0, 0.0, list[float]()
    cases = list[Case]()
    for place, (ids, row) in enumerate(zip(drawn, log_probs, strict=True)):
        scaled = (row.double() / setting.temperature).log_softmax(-1)
        allowed = _allowed(scaled, setting, limits.tie)
        out = [token for token in ids if not allowed[token]]
        outside += len(out)
        had_it_been_ignored += len(ids) * float(scaled.exp()[~allowed].sum())
        p = _p_value(ids, scaled, setting)
        tests += [] if p is None else [p]
        if out or (p is not None and p < limits.least_p):
            often = Counter(out or ids).most_common(5)
            cases.append({"check": name, "place": place, "p": p, "outside": len(out), "drawn": often})
    found, is_known = _in_words(setting, outside, had_it_been_ignored, tests, sum(map(len, drawn)))
    limit = f"{'none outside, ' if setting.filters else ''}p at least {limits.least_p:g}"
    fails = outside > 0 or any(not p >= limits.least_p for p in tests)
    return Comparison(name, found, limit, False if fails else True if is_known else None, _ADVICE, cases)


def _in_words(
    setting: Sampling, outside: int, ignored: float, tests: Sequence[float], draws: int
) -> tuple[str, bool]:
    """The finding, and whether a sampler that ignores the setting would have been caught."""
    p = f"frequencies p {min(tests):.2g}" if tests else "no position for a test of frequencies"
    if not setting.filters:
        return f"{p}, {draws} draws", bool(tests)
    expected = f"{outside} of {draws} draws outside (about {ignored:.0f} if it were ignored)"
    return f"{expected}, {p}", ignored >= ENOUGH


def _kept(scaled: torch.Tensor, setting: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids by probability, and how many of them the setting keeps."""
    order = scaled.argsort(descending=True, stable=True)
    probs = scaled.exp()[order]
    before = probs.cumsum(-1) - probs
    count = torch.tensor(len(order))
    if setting.top_k > 0:
        count = torch.tensor(min(setting.top_k, len(order)))
    if setting.top_p < 1:
        count = (before < setting.top_p).sum()
    return order, count


def _allowed(scaled: torch.Tensor, setting: Sampling, tie: float) -> torch.Tensor:
    """Ids that may be drawn, including those only rounding excludes."""
    order, count = _kept(scaled, setting)
    if count == len(order):
        return torch.ones_like(scaled, dtype=torch.bool)
    least = scaled[order[count - 1]] - tie
    allowed = scaled >= least
    if setting.top_p < 1:
        probs = scaled.exp()[order]
        near = probs.cumsum(-1) - probs < setting.top_p + min(tie, _MARGIN)
        allowed[order[near]] = True
    return allowed


def _p_value(ids: Sequence[int], scaled: torch.Tensor, setting: Sampling) -> float | None:
    """Pearson's test of the draws' frequencies. None with fewer than two cells."""
    order, count = _kept(scaled, setting)
    if setting.top_p < 1:
        cumulated = [0.0, *scaled.exp()[order][:count].cumsum(-1).tolist()]
        # The engine's nucleus may have one id more or less.
        if min(abs(mass - setting.top_p) for mass in cumulated[-2:]) < _MARGIN:
            return None
    kept = order[:count]
    expected = scaled.exp()[kept]
    expected = expected / expected.sum() * len(ids)
    observed = torch.bincount(torch.tensor(ids), minlength=len(scaled))[kept]
    cells = int((expected >= _LEAST_EXPECTED).sum())
    want, have = expected[:cells].tolist(), observed[:cells].tolist()
    rare = float(expected[cells:].sum()), len(ids) - sum(have)
    if rare[0] >= _LEAST_EXPECTED:
        want, have = [*want, rare[0]], [*have, rare[1]]
    elif cells:
        want[-1] += rare[0]
        have[-1] += rare[1]
    if len(want) < 2:
        return None
    return float(stats.chisquare(have, [each * len(ids) / sum(want) for each in want]).pvalue)
