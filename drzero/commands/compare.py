"""`drzero compare BEFORE AFTER`: two evaluations of the same tasks or questions.

    drzero compare outputs/checkpoints/evaluate_wordle outputs/checkpoints/evaluate_after

Both are run folders of evaluations. Tasks that both have answered are compared in pairs: the share right,
with Newcombe's interval of its change and the exact McNemar test (drzero/stages/evaluate/changes.py), and an
environment's reward, with Student's interval of the mean difference and Wilcoxon's signed-rank test.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from scipy import stats

from data.journal import read_records
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.evaluate import ANSWERS, Records
from drzero.stages.evaluate.changes import ExactMatchChange, by_benchmark
from drzero.stages.evaluate.intervals import mean_interval
from drzero.stages.result import REPORT


def run_compare(arguments: Sequence[str]) -> None:
    """Print how the second evaluation differs from the first. Raises CheckError if none can be compared."""
    if len(arguments) != 2:
        raise CheckError("compare takes two folders of evaluations: drzero compare BEFORE AFTER")
    before, after = (_records(Path(folder)) for folder in arguments)
    changes = by_benchmark(before, after)
    if not changes:
        raise CheckError(f"{arguments[0]} and {arguments[1]} have answered nothing in common")
    for line in _totals(arguments, list(changes.values())[-1]):
        console().print(line, soft_wrap=True)
    for warning in _differing_conditions(*map(Path, arguments)):
        console().print(warning, soft_wrap=True)
    table = _table("right, exact McNemar test", "won", "lost")
    for name, change in changes.items():
        shares = (f"{change.before:.3f}", f"{change.after:.3f}", f"{change.effect:+.3f}")
        interval = f"[{change.low:+.3f}, {change.high:+.3f}]"
        won = (str(change.gained), str(change.lost))
        table.add_row(name, str(change.n), *shares, interval, f"{change.p:.2g}", *won)
    console().print(table)
    if rewards := paired_rewards(before, after):
        console().print(_rewards_table(rewards))


def _totals(folders: Sequence[str], change: ExactMatchChange) -> Iterator[str]:
    """Who is compared, and how many of the shared questions each has right."""
    for side, folder, share in zip(("before", "after"), folders, (change.before, change.after), strict=True):
        model = _report(Path(folder))["model"]
        yield f"{side}: {round(share * change.n)} of {change.n} right, {model} ({folder})"


def paired_rewards(before: Records, after: Records) -> list[tuple[float, float]]:
    """The rewards of tasks that both have played, in pairs. Benchmark questions have no reward."""
    was = {(record["benchmark"], record["key"]): record["reward"] for record in before if "reward" in record}
    pairs = [(was.get((r["benchmark"], r["key"])), r["reward"]) for r in after if "reward" in r]
    return [(float(first), float(second)) for first, second in pairs if first is not None]


def _rewards_table(pairs: Sequence[tuple[float, float]]) -> Table:
    changes = [after - before for before, after in pairs]
    low, high = mean_interval(changes)
    # Equal pairs cannot be ranked.
    p = float(stats.wilcoxon(changes, zero_method="zsplit").pvalue) if any(changes) else 1.0
    means = [fmean(column) for column in zip(*pairs, strict=True)]
    table = _table("reward, Wilcoxon's signed-rank test")
    interval = "–" if low is None or high is None else f"[{low:+.3f}, {high:+.3f}]"
    shown = (f"{means[0]:.3f}", f"{means[1]:.3f}", f"{fmean(changes):+.3f}")
    table.add_row("all", str(len(pairs)), *shown, interval, f"{p:.2g}")
    return table


def _table(title: str, *more: str) -> Table:
    columns = ("n", "before", "after", "change", "95 % interval", "p", *more)
    return new_table(title, "", *(f">{column}" for column in columns))


def _records(folder: Path) -> Records:
    if not (folder / REPORT).is_file() or not (folder / ANSWERS).is_file():
        raise CheckError(
            f"{folder} is no finished evaluation: it has no {REPORT} (drzero evaluate writes one)"
        )
    asked = _report(folder)["benchmarks"]
    return [record for record in read_records(folder / ANSWERS) if record["benchmark"] in asked]


def _report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / REPORT).read_text(encoding="utf-8")))


def _differing_conditions(before: Path, after: Path) -> list[str]:
    was, now = (_report(folder)["conditions"] for folder in (before, after))
    return [
        f"note: {key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*was, *now} - {"model"})
        if was.get(key) != now.get(key)
    ]
