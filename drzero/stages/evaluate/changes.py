"""How exact match changed between models asked the same questions, and over several training seeds.

The p value is McNemar's exact test: without a change, a question that only one model answers right is as
likely the first's as the second's. The interval is Newcombe's for paired shares (Stat. Med. 17, 1998, method
10). Neither covers other training seeds: `over_seeds` does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from scipy import stats

from drzero.stages.evaluate import Records
from drzero.stages.evaluate.intervals import LEVEL, wilson

ALL = "all questions"  # the questions of all benchmarks together


@dataclass(frozen=True)
class ExactMatchChange:
    """The change of exact match on the `n` questions that both models answered."""

    n: int
    before: float
    after: float
    gained: int  # questions that only the second model answers right
    lost: int
    effect: float
    low: float
    high: float  # end of the 95 % interval, which begins at `low`
    p: float  # Two-sided


def paired(before: Records, after: Records) -> ExactMatchChange | None:
    """The change over the questions that both have answered, None without any. See `answers.jsonl`."""
    was = {record["key"]: bool(record["right"]) for record in before}
    pairs = [(was[record["key"]], bool(record["right"])) for record in after if record["key"] in was]
    if not pairs:
        return None
    both, lost, gained, neither = (pairs.count(pair) for pair in product((True, False), (True, False)))
    low, high = newcombe(both, lost, gained, neither)
    n = len(pairs)
    return ExactMatchChange(
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
    """The interval of the share right after minus before, by the counts of all four outcomes."""
    n = both + lost + gained + neither
    right = (both + gained, both + lost)
    (low, high), (low_before, high_before) = (wilson(k, n) for k in right)
    after, before = (k / n for k in right)
    # The correlation of both, less a continuity correction.
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
    """A change measured with several training seeds."""

    changes: tuple[ExactMatchChange, ...]
    effect: float
    low: float
    high: float  # the 95 % interval covers other seeds and other questions
    p: float | None  # Student's two-sided test that the seeds' mean is 0. None if they do not vary.

    @property
    def each(self) -> str:
        """Each seed's share after it, with the questions won and lost: `.26 (9, 2), .50 (31, 0)`."""
        found = (f"{one.after:.2f} ({one.gained}, {one.lost})" for one in self.changes)
        return ", ".join(share.removeprefix("0") for share in found)


def over_seeds(changes: Sequence[ExactMatchChange]) -> SeedsChange:
    """The mean change of one or more seeds.

    The seeds' mean has Student's interval, and the shared questions have theirs. MOVER combines both
    distances like standard errors. A single seed has only the questions' interval.
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


def by_benchmark(before: Records, after: Records) -> dict[str, ExactMatchChange]:
    """The change by benchmark, and over `ALL` if there are several."""
    names = list(dict.fromkeys(record["benchmark"] for record in before))
    found = {
        name: paired(*([r for r in records if r["benchmark"] == name] for records in (before, after)))
        for name in names
    }
    if len(names) > 1:
        found[ALL] = paired(before, after)
    return {name: change for name, change in found.items() if change}


def benchmarks_over_seeds(changes: Sequence[Mapping[str, ExactMatchChange]]) -> dict[str, SeedsChange]:
    """The seeds' results of `by_benchmark` summed up, for the benchmarks that all seeds have."""
    common = [name for name in changes[0] if all(name in each for each in changes)] if changes else []
    return {name: over_seeds([each[name] for each in changes]) for name in common}


def gains_over_seeds(loops: Sequence[Mapping[int, Records]], last: int) -> dict[str, SeedsChange]:
    """The change from the base model to iteration `last`, over the loops with both evaluations."""
    return benchmarks_over_seeds(
        [by_benchmark(answers[0], answers[last]) for answers in loops if {0, last} <= answers.keys()]
    )


def loop_changes(answers: Mapping[int, Records]) -> list[dict[str, Any]]:
    """Each iteration's change by benchmark, against the base model (0) and the iteration before."""
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
