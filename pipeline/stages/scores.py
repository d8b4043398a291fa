"""Scores of an evaluation: per benchmark with bootstrap intervals, next to the paper's figures.

    scores, averages = score_all(journal.records, failed, ["nq", "popqa"])
    Console().print(evaluation_table("solver_iter2", scores, averages))

A question that failed because of a service is in no score. *Macro* averages weigh each benchmark alike, as
the paper does; *micro* averages weigh each question alike. The interval is the percentile bootstrap over
questions. `scipy.stats.bootstrap` keeps no resampled means, which the averages' intervals combine over
benchmarks; and a draw over counts of distinct values takes milliseconds for 50,000 questions of which each is
right or wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pipeline.tables import new_table

RESAMPLES = 10_000
LEVEL = 0.95


def resampled_means(
    values: Sequence[float], rng: np.random.Generator, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """The means of `resamples` bootstrap resamples of `values`; raises ValueError for no values."""
    if not len(values):
        raise ValueError("there is no mean of no values")
    distinct_V, counts_V = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    drawn_RV = rng.multinomial(len(values), counts_V / len(values), size=resamples)
    # Rounding must not push a mean outside the values.
    return np.clip(drawn_RV @ distinct_V / len(values), distinct_V[0], distinct_V[-1])


def interval(means: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """The central share `level` of the resampled means, as its lower and upper end."""
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


Records = Sequence[Mapping[str, Any]]

PAPER_SOURCE = "arXiv 2601.07055, table 1: E5-base, top-3, English Wikipedia"
PAPER_BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
PAPER = {
    "3B\nSearch-\nR1": (0.323, 0.537, 0.364, 0.308, 0.336, 0.105, 0.315),
    "3B\nDr.\nZero": (0.397, 0.572, 0.431, 0.298, 0.291, 0.091, 0.200),
    "7B\nSearch-\nR1": (0.397, 0.606, 0.404, 0.380, 0.326, 0.168, 0.408),
    "7B\nDr.\nZero": (0.406, 0.608, 0.416, 0.362, 0.347, 0.104, 0.360),
}
"""Exact match of the supervised baseline and the best iteration, in the order of PAPER_BENCHMARKS."""
PAPER_MACRO = (0.327, 0.326, 0.384, 0.372)
"""The averages as printed in the paper, in the order of PAPER."""

_BOOTSTRAP_SEED = 0
_MICRO, _MACRO = "micro average", "macro average"


@dataclass(frozen=True)
class Score:
    """One row: a benchmark, or an average over several."""

    n: int
    """Questions answered."""
    em: float | None
    """Exact match in [0, 1]; None if no question was answered."""
    em_low: float | None
    em_high: float | None
    """Ends of the bootstrap 95 % interval."""
    f1: float | None
    searches: float | None
    """Answered searches per question."""
    truncated_turn_share: float | None
    """Share of turns cut off by their token limit."""
    invalid_call_share: float | None
    """Share of tool calls that were no valid search call; None if there was no call."""
    failed: int
    """Questions without an answer because services failed."""


def score(records: Records, failed: int, resampled: NDArray[np.float64] | None) -> Score:
    """The score of one benchmark's records; `resampled` are the bootstrap means of its exact match."""
    n = len(records)
    low, high = interval(resampled) if resampled is not None else (None, None)

    def share(part: str, whole: str | None = None) -> float | None:
        total = sum(record[whole] for record in records) if whole else n
        return sum(record[part] for record in records) / total if total else None

    return Score(
        n=n,
        em=share("right"),
        em_low=low,
        em_high=high,
        f1=share("f1"),
        searches=share("searches"),
        truncated_turn_share=share("truncated_turns", "turns"),
        invalid_call_share=share("invalid_calls", "calls"),
        failed=failed,
    )


def score_all(
    records: Records, failed: Mapping[str, int], benchmarks: Sequence[str]
) -> tuple[dict[str, Score], dict[str, Score]]:
    """The scores by benchmark, in the order given, and the two averages over those that have answers.

    `failed` counts the unanswered questions of each benchmark. The same answers to a benchmark give it the
    same interval, whichever others are evaluated with it.
    """
    groups = {name: [record for record in records if record["benchmark"] == name] for name in benchmarks}
    # A generator of its own for each benchmark, so that its interval does not depend on the others.
    rngs = {name: np.random.default_rng([_BOOTSTRAP_SEED, *name.encode()]) for name in benchmarks}
    resampled = {
        name: resampled_means([float(record["right"]) for record in group], rngs[name])
        for name, group in groups.items()
        if group
    }
    scores = {name: score(group, failed.get(name, 0), resampled.get(name)) for name, group in groups.items()}
    if len(resampled) < 2:
        return scores, {}
    weights = np.array([scores[name].n for name in resampled], dtype=np.float64)
    means_BR = np.stack(list(resampled.values()))
    micro = score(records, sum(failed.values()), weights @ means_BR / weights.sum())
    low, high = interval(means_BR.mean(axis=0))
    means: dict[str, Any] = {}
    for name in ("em", "f1", "searches", "truncated_turn_share", "invalid_call_share"):
        values = [value for each in resampled if (value := getattr(scores[each], name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    macro = replace(micro, em_low=low, em_high=high, **means)
    return scores, {_MICRO: micro, _MACRO: macro}


def evaluation_table(title: str, scores: Mapping[str, Score], averages: Mapping[str, Score]) -> Table:
    """The scores as a table; with the paper's figures if it has any for these benchmarks."""
    paper: dict[str, Sequence[float]] = dict(
        zip(PAPER_BENCHMARKS, zip(*PAPER.values(), strict=True), strict=True)
    )
    with_paper = any(name in paper for name in scores)
    if set(scores) == set(paper):
        paper[_MACRO] = PAPER_MACRO
    headings = ("n", "EM", "95 %\ninterval", "F1", "searches", "turns\ncut off", "invalid\ncalls", "failed")
    table = new_table(
        title,
        *("", *(f">{heading}" for heading in (*headings, *(PAPER if with_paper else ())))),
        padding=(0, 0, 0, 1),
        caption=f"The paper's figures: {PAPER_SOURCE}" if with_paper else None,
        caption_justify="left",
    )
    for name, row in {**scores, **averages}.items():
        if name == _MICRO:
            table.add_section()
        between = "–" if row.em_low is None else f"{_number(row.em_low)}–{_number(row.em_high)}"
        searches = "–" if row.searches is None else f"{row.searches:.2f}"
        shares = (_number(row.truncated_turn_share), _number(row.invalid_call_share))
        cells = (str(row.n), _number(row.em), between, _number(row.f1), searches, *shares, str(row.failed))
        table.add_row(name, *cells, *map(_number, paper.get(name, ())))
    return table


def _number(value: float | None) -> str:
    """Three digits as the paper prints them, .326, because the table is wide."""
    return "–" if value is None else f"{value:.3f}".removeprefix("0")
