"""Checks of the engine's sampler: temperature, top-p and top-k do what they say.

At a few positions the next id is drawn again and again, and compared with the distribution that Transformers
has there. An id outside the nucleus cannot have been drawn by a sampler that honours top-p; a sampler that
honours it too well (a greedy one, another temperature) shows in the frequencies, by Pearson's chi-square
test. Each setting is asked for by itself, because engines differ in which of several they apply first.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats

from drzero.labs.consistency.check import Case, Check, Limits
from drzero.labs.consistency.engine import Continued

ENOUGH = 10.0
"""Ids outside that a sampler without the filter had to draw for the check to mean something."""
_LEAST_EXPECTED = 5.0
"""Draws that a cell of the chi-square test needs; rarer ids are taken together."""
_BEST_TOP = math.log(0.4)
"""Log-probability of the first id where draws say most: neither certain nor one of thousands."""
_MARGIN = 0.02
"""Rounding of a probability, at most: a nucleus that ends within it has another last id on each side."""
_ADVICE = (
    "the engine's sampler: its sampling backend, parameters that a proxy drops, or defaults of "
    "generation_config.json that it applies by itself"
)


@dataclass(frozen=True)
class Setting:
    """One way to sample."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @property
    def filters(self) -> bool:
        """Whether it excludes ids."""
        return self.top_p < 1 or self.top_k > 0


SETTINGS = (
    Setting("temperature 1"),
    Setting("temperature 0.5", temperature=0.5),
    Setting("top-p 0.7", top_p=0.7),
    Setting("top-k 3", top_k=3),
)


@dataclass(frozen=True)
class Place:
    """A position within what the engine sampled after a prompt."""

    prompt: int
    position: int


def choose_places(sampled: Sequence[Continued], count: int) -> list[Place]:
    """Positions where the engine was neither sure nor lost, one of a prompt at most."""
    best = []
    for prompt, made in enumerate(sampled):
        firsts = [top[0][1] for top in made.tops] if made.tops else made.log_probs
        distances = [abs(log_prob - _BEST_TOP) for log_prob in firsts]
        position = min(range(len(distances)), key=distances.__getitem__)
        best.append((distances[position], Place(prompt, position)))
    return [place for _, place in sorted(best, key=lambda one: one[0])[:count]]


def check_sampling(
    setting: Setting, drawn: Sequence[Sequence[int]], log_probs: Sequence[torch.Tensor], limits: Limits
) -> Check:
    """The ids drawn at each place, against Transformers' log-probabilities (vocabulary,) there."""
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
            cases.append({"check": setting.name, "place": place, "p": p, "outside": len(out), "drawn": often})
    found, is_known = _in_words(setting, outside, had_it_been_ignored, tests, sum(map(len, drawn)))
    limit = f"{'none outside, ' if setting.filters else ''}p at least {limits.least_p:g}"
    fails = outside > 0 or any(not p >= limits.least_p for p in tests)
    return Check(setting.name, found, limit, False if fails else True if is_known else None, _ADVICE, cases)


def _in_words(
    setting: Setting, outside: int, ignored: float, tests: Sequence[float], draws: int
) -> tuple[str, bool]:
    """What was found, and whether a sampler that ignores the setting would have been seen."""
    p = f"frequencies p {min(tests):.2g}" if tests else "no position for a test of frequencies"
    if not setting.filters:
        return f"{p}, {draws} draws", bool(tests)
    expected = f"{outside} of {draws} draws outside (about {ignored:.0f} if it were ignored)"
    return f"{expected}, {p}", ignored >= ENOUGH


def _kept(scaled: torch.Tensor, setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of ids, most probable first, and how many of it the setting leaves."""
    order = scaled.argsort(descending=True, stable=True)
    probs = scaled.exp()[order]
    before = probs.cumsum(-1) - probs
    count = torch.tensor(len(order))
    if setting.top_k > 0:
        count = torch.tensor(min(setting.top_k, len(order)))
    if setting.top_p < 1:
        count = (before < setting.top_p).sum()
    return order, count


def _allowed(scaled: torch.Tensor, setting: Setting, tie: float) -> torch.Tensor:
    """Ids that may be drawn, those included that only rounding keeps out."""
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


def _p_value(ids: Sequence[int], scaled: torch.Tensor, setting: Setting) -> float | None:
    """Of Pearson's test of the draws' frequencies; None where the place has less than two cells for it."""
    order, count = _kept(scaled, setting)
    if setting.top_p < 1:
        cumulated = [0.0, *scaled.exp()[order][:count].cumsum(-1).tolist()]
        # Where the nucleus ends within rounding, the engine's may have one id more or less.
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
