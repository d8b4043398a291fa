"""Scores on benchmarks, with intervals and next to the paper's figures.

    scores, averages = score_all(journal.records, failed, ["nq", "popqa"])
    console().print(evaluation_table("solver_iter2", scores, averages))

A failed question is in no score. The macro average weighs benchmarks alike, the micro average questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from drzero.recipe.tables import new_table
from drzero.stages.evaluate import Records
from drzero.stages.evaluate.intervals import averaged, wilson

PAPER_SOURCE = "arXiv 2601.07055, table 1: E5-base, top-3, English Wikipedia"
PAPER_BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
PAPER = {
    "3B\nSearch-\nR1": (0.323, 0.537, 0.364, 0.308, 0.336, 0.105, 0.315),
    "3B\nDr.\nZero": (0.397, 0.572, 0.431, 0.298, 0.291, 0.091, 0.200),
    "7B\nSearch-\nR1": (0.397, 0.606, 0.404, 0.380, 0.326, 0.168, 0.408),
    "7B\nDr.\nZero": (0.406, 0.608, 0.416, 0.362, 0.347, 0.104, 0.360),
}
"""Exact match of the supervised baseline and of the best iteration, in the order of PAPER_BENCHMARKS."""
PAPER_MACRO = (0.327, 0.326, 0.384, 0.372)  # the averages as printed in the paper, in the order of PAPER

_MICRO, _MACRO = "micro average", "macro average"


@dataclass(frozen=True)
class BenchmarkScore:
    """One row: a benchmark, or an average over several."""

    n: int
    em: float | None  # Exact match in [0, 1]. None if no question was answered.
    em_low: float | None
    em_high: float | None
    f1: float | None
    searches: float | None  # answered searches per question
    truncated_turn_share: float | None  # share of turns cut off by their token limit
    invalid_call_share: float | None  # Share of tool calls that were not valid. None without a call.
    failed: int  # questions without an answer because services failed


def score(records: Records, failed: int) -> BenchmarkScore:
    """The score of one benchmark's records."""
    n = len(records)
    low, high = wilson(sum(record["right"] for record in records), n) if n else (None, None)

    def share(part: str, whole: str | None = None) -> float | None:
        total = sum(record[whole] for record in records) if whole else n
        return sum(record[part] for record in records) / total if total else None

    return BenchmarkScore(
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
) -> tuple[dict[str, BenchmarkScore], dict[str, BenchmarkScore]]:
    """The scores by benchmark, and both averages. `failed` counts each benchmark's unanswered questions."""
    groups = {name: [record for record in records if record["benchmark"] == name] for name in benchmarks}
    scores = {name: score(group, failed.get(name, 0)) for name, group in groups.items()}
    answered = [each for each in scores.values() if each.n]
    if len(answered) < 2:
        return scores, {}
    sizes = [each.n for each in answered]
    rights = [sum(record["right"] for record in group) for group in groups.values() if group]
    _, low, high = averaged(sizes, rights, sizes)
    micro = replace(score(records, sum(failed.values())), em_low=low, em_high=high)
    em, low, high = averaged([1] * len(answered), rights, sizes)
    means: dict[str, Any] = {"em": em, "em_low": low, "em_high": high}
    for name in ("f1", "searches", "truncated_turn_share", "invalid_call_share"):
        values = [value for each in answered if (value := getattr(each, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return scores, {_MICRO: micro, _MACRO: replace(micro, **means)}


def evaluation_table(
    title: str, scores: Mapping[str, BenchmarkScore], averages: Mapping[str, BenchmarkScore]
) -> Table:
    """The scores as a table, with the paper's figures for benchmarks it has."""
    rows = zip(*PAPER.values(), strict=True)
    paper: dict[str, Sequence[float]] = dict(zip(PAPER_BENCHMARKS, rows, strict=True))
    with_paper = any(name in paper for name in scores)
    if set(scores) == set(paper):
        paper[_MACRO] = PAPER_MACRO
    headings = ["n", "EM", "95 %\ninterval", "F1", "searches", "turns\ncut off", "invalid\ncalls", "failed"]
    headings += PAPER if with_paper else []
    table = new_table(
        title,
        "",
        *(f">{heading}" for heading in headings),
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
    """Three digits as the paper prints them, such as .326: the table is wide."""
    return "–" if value is None else f"{value:.3f}".removeprefix("0")
