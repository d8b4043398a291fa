"""The loop's tables: finished stages (`drzero status`), exact match by iteration, its changes over seeds."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from data.journal import read_records
from drzero.loop.manifest import Manifest, StageEntry
from drzero.recipe.tables import console, new_table
from drzero.stages.evaluate import ANSWERS, Records
from drzero.stages.result import REPORT, RESULT, write_report

_STATES = {"failed": "stopped", "forgotten": "to redo", "pending": "–"}


def print_loop(
    manifest: Manifest, names: Sequence[str], title: str = "self-evolution loop", *, running: bool
) -> None:
    """Print a row for each stage. Without a `running` loop, a stage recorded as running was killed."""
    columns = ("stage", "state", ">starts", ">minutes", ">tokens", "figures")
    table = new_table(title, *columns)
    for name in names:
        entry = manifest.entries.get(name, StageEntry())
        state = _STATES.get(entry.state, entry.state)
        if state == "running" and not running:
            state = "killed"
        seconds = entry.seconds + (time.time() - (entry.started or 0) if state == "running" else 0)
        figures = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in entry.figures.items()
        )
        minutes = f"{seconds / 60:.1f}" if seconds else "–"
        tokens = f"{entry.tokens:,}" if entry.tokens else "–"
        outcome = entry.error or ", ".join(figures)
        table.add_row(name, state, str(entry.starts or "–"), minutes, tokens, outcome)
    console().print(table)


def report_scores(folders: Mapping[int, Path], loop: Path) -> None:
    """Print exact match by benchmark and its changes, and write both into the loop's report."""
    if not folders:
        return
    from drzero.stages.evaluate.changes import loop_changes  # with scipy, which a waiting loop must not hold

    scores = {iteration: _scores(run) for iteration, run in folders.items()}
    changes = loop_changes({iteration: _records(run) for iteration, run in folders.items()})
    write_report(loop, {"scores": scores, "changes": changes})
    table = new_table("exact match, 95 % interval", "benchmark", ">n", *(f">{_model(i)}" for i in scores))
    for benchmark, first in scores[min(scores)].items():
        cells = [_score(report.get(benchmark)) for report in scores.values()]
        table.add_row(benchmark, str(first["n"]), *cells)
    console().print(table)
    if changes:
        console().print(_changes_table(changes))


def read_answers(loop: Path) -> dict[int, Records]:
    """The records of a loop's finished evaluations by iteration. `loop` is its `paths.checkpoints`."""
    finished = sorted(result.parent for result in loop.glob(f"evaluate_iter*/{RESULT}"))
    return {int(run.name.removeprefix("evaluate_iter")): _records(run) for run in finished}


def _scores(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / REPORT).read_text(encoding="utf-8"))["benchmarks"])


def _records(run: Path) -> Records:
    asked = _scores(run)
    return [record for record in read_records(run / ANSWERS) if record["benchmark"] in asked]


def print_seeds(seeds: Mapping[int, Mapping[int, Records]]) -> None:
    """Print the change from the base model to the last iteration that all seeds have evaluated."""
    from drzero.stages.evaluate.changes import gains_over_seeds

    last = last_of_all(seeds.values())
    gains = gains_over_seeds(list(seeds.values()), last) if last else {}
    if not gains:
        return
    shares, tested = (">base", f">{_model(last)}"), (">95 % interval", ">p", ">each seed (won, lost)")
    compared = len(next(iter(gains.values())).changes)
    table = new_table(
        f"change of exact match over {compared} seeds", "benchmark", ">n", *shares, ">change", *tested
    )
    for benchmark, found in gains.items():
        means = (fmean(getattr(change, name) for change in found.changes) for name in ("before", "after"))
        table.add_row(
            benchmark,
            str(found.changes[0].n),
            *(f"{share:.3f}" for share in means),
            f"{found.effect:+.3f}",
            f"[{found.low:+.3f}, {found.high:+.3f}]",
            "–" if found.p is None else f"{found.p:.2g}",
            found.each,
        )
    console().print(table)


def last_of_all(loops: Iterable[Mapping[int, Records]]) -> int:
    """The last iteration evaluated by every loop that has evaluated any, else 0."""
    return min((last for answers in loops if (last := max(answers, default=0))), default=0)


def _model(iteration: int) -> str:
    return f"iteration {iteration}" if iteration else "base"


def _changes_table(changes: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("benchmark", "from", "to", ">n", ">won", ">lost", ">change", ">95 % interval", ">p")
    table = new_table("change of exact match on the same questions, exact McNemar test", *columns)
    for change in changes:
        table.add_row(
            change["benchmark"],
            _model(change["earlier"]),
            _model(change["later"]),
            *(str(change[name]) for name in ("n", "gained", "lost")),
            f"{change['effect']:+.3f}",
            f"[{change['low']:+.3f}, {change['high']:+.3f}]",
            f"{change['p']:.2g}",
        )
    return table


def _score(row: Mapping[str, float | None] | None) -> str:
    if row is None or row["em"] is None:  # not asked, or every question lost to a failing service
        return "–"
    return f"{row['em']:.3f} [{row['em_low']:.3f}, {row['em_high']:.3f}]"
