"""Changes of exact match between models that were asked the same questions, and over several training seeds.

    change = paired(before, after)              # records of two evaluations
    print(change.effect, change.low, change.high, change.p)

The p value is that of McNemar's test in its exact form: of the questions that one model alone answers right,
each is as likely the one's as the other's if there is no change, so their number is binomial with a half. The
usual form by chi-square needs more than the handful of questions that differ here. The interval is Newcombe's
for a difference of paired shares (Stat. Med. 17, 1998, method 10), which combines Wilson's ends and so has a
width where nothing differs. Neither covers other training seeds: `over_seeds` does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from scipy import stats

from drzero.stages.scores import LEVEL, Records, wilson

ALL = "all questions"
"""The questions of all benchmarks, as one."""


@dataclass(frozen=True)
class Change:
    """How exact match changed from one model to another, on the `n` questions that both answered."""

    n: int
    before: float
    after: float
    gained: int
    """Questions that the second model alone answers right."""
    lost: int
    effect: float
    """After minus before."""
    low: float
    high: float
    """Ends of the 95 % interval of the effect."""
    p: float
    """Two-sided."""


def paired(before: Records, after: Records) -> Change | None:
    """The change over the questions that both have answered; None if there is none.

    The records are those of `answers.jsonl`: `key` identifies a question, `right` says whether it was right.
    """
    was = {record["key"]: bool(record["right"]) for record in before}
    pairs = [(was[record["key"]], bool(record["right"])) for record in after if record["key"] in was]
    if not pairs:
        return None
    both, lost, gained, neither = (pairs.count(pair) for pair in product((True, False), (True, False)))
    low, high = newcombe(both, lost, gained, neither)
    n = len(pairs)
    return Change(
        n=n,
        before=(both + lost) / n,
        after=(both + gained) / n,
        gained=gained,
        lost=lost,
        effect=(gained - lost) / n,
        low=low,
        high=high,
        p=float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0,
    )


def newcombe(both: int, lost: int, gained: int, neither: int) -> tuple[float, float]:
    """The interval of the share right after minus before, from how many questions were right when.

    Of one question or more: right both times, before only, after only, never.
    """
    n = both + lost + gained + neither
    right = (both + gained, both + lost)
    (low, high), (low_before, high_before) = (wilson(k, n) for k in right)
    after, before = (k / n for k in right)
    # The correlation of the two, less a continuity correction.
    margins = math.prod((both + gained, lost + neither, both + lost, gained + neither))
    together = both * neither - gained * lost
    phi = (max(together - n / 2, 0) if together > 0 else together) / math.sqrt(margins) if margins else 0.0

    def distance(mine: float, other: float) -> float:
        return math.sqrt(mine**2 - 2 * phi * mine * other + other**2)

    return (
        after - before - distance(after - low, high_before - before),
        after - before + distance(high - after, before - low_before),
    )


@dataclass(frozen=True)
class SeedsChange:
    """A change that was measured with several training seeds."""

    changes: tuple[Change, ...]
    """Of each seed."""
    effect: float
    """Their mean."""
    low: float
    high: float
    """Ends of the 95 % interval: for other seeds and other questions."""
    p: float | None
    """Of Student's test that the seeds' mean is 0, two-sided; None where they do not vary."""


def over_seeds(changes: Sequence[Change]) -> SeedsChange:
    """The mean change of one or more seeds.

    Two things vary: the seeds, whose mean has Student's interval, and the questions, which are the same for
    all of them. The distances of both intervals from the mean are combined as standard errors are (MOVER).
    One seed is no measure of seeds, and its interval is that of the questions alone.
    """
    effects = [change.effect for change in changes]
    mean, of_seeds, p = float(np.mean(effects)), 0.0, None
    if len(set(effects)) > 1:
        test = stats.ttest_1samp(effects, 0.0)
        of_seeds, p = float(test.confidence_interval(LEVEL).high) - mean, float(test.pvalue)
    below, above = (
        math.hypot(of_seeds, float(np.mean([abs(end - change.effect) for end, change in ends])))
        for ends in ([(c.low, c) for c in changes], [(c.high, c) for c in changes])
    )
    return SeedsChange(tuple(changes), mean, max(mean - below, -1.0), min(mean + above, 1.0), p)


def by_benchmark(before: Records, after: Records) -> dict[str, Change]:
    """The change of each benchmark that has common questions; of several also that of `ALL`."""
    names = list(dict.fromkeys(record["benchmark"] for record in before))
    found = {
        name: paired(*([r for r in records if r["benchmark"] == name] for records in (before, after)))
        for name in names
    }
    if len(names) > 1:
        found[ALL] = paired(before, after)
    return {name: change for name, change in found.items() if change}


def benchmarks_over_seeds(changes: Sequence[Mapping[str, Change]]) -> dict[str, SeedsChange]:
    """Those of `by_benchmark`, one of each seed, over the seeds; of the benchmarks that all of them have."""
    common = [name for name in changes[0] if all(name in each for each in changes)] if changes else []
    return {name: over_seeds([each[name] for each in changes]) for name in common}


def gains_over_seeds(loops: Sequence[Mapping[int, Records]], last: int) -> dict[str, SeedsChange]:
    """What several seeds' loops changed from the base model to iteration `last`, by benchmark.

    `loops` are the records of each iteration's evaluation; a loop without one of the two is left out.
    """
    return benchmarks_over_seeds(
        [by_benchmark(answers[0], answers[last]) for answers in loops if {0, last} <= answers.keys()]
    )


def loop_changes(answers: Mapping[int, Records]) -> list[dict[str, Any]]:
    """What each iteration changed by benchmark: against the base model (0), and against the last iteration.

    `answers` are the records of each iteration's evaluation. One dict a change: the fields of `Change`, with
    `benchmark`, `earlier` and `later`.
    """
    iterations = sorted(answers)
    compared = [(0, later) for later in iterations if later]
    compared += [(earlier, later) for earlier, later in pairwise(iterations) if earlier]
    found = {which: by_benchmark(answers[which[0]], answers[which[1]]) for which in compared}
    names = dict.fromkeys(name for changes in found.values() for name in changes)
    return [
        {"benchmark": name, "earlier": earlier, "later": later, **asdict(changes[name])}
        for name in names
        for (earlier, later), changes in found.items()
        if name in changes
    ]
