"""The loop as tables: which stages are finished (`drzero status`), and the solver's scores by iteration."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.loop.manifest import Manifest, StageEntry
from pipeline.tables import console, new_table

_STATES = {"failed": "stopped", "forgotten": "to redo", "pending": "–"}
"""What the table calls a state; the others by their own name."""


def print_loop(manifest: Manifest, names: Sequence[str], *, running: bool) -> None:
    """One row a stage: state, starts, time, tokens, figures.

    `running`: whether a loop runs now. If none does, a stage recorded as running was killed.
    """
    columns = ("stage", "state", ">starts", ">minutes", ">tokens", "figures")
    table = new_table("self-evolution loop", *columns)
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


def print_scores(folders: Mapping[int, Path]) -> None:
    """Exact match by benchmark: the base model and each iteration, with 95 % intervals.

    A loop without evaluations has no scores to print.
    """
    if not folders:
        return
    reports = {
        iteration: json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
        for iteration, folder in folders.items()
    }
    columns = (f">iteration {iteration}" if iteration else ">base" for iteration in reports)
    table = new_table("exact match, 95 % interval", "benchmark", ">n", *columns)
    for benchmark, first in reports[min(reports)].items():
        cells = [_score(report.get(benchmark)) for report in reports.values()]
        table.add_row(benchmark, str(first["n"]), *cells)
    console().print(table)


def _score(row: Mapping[str, float | None] | None) -> str:
    if row is None or row["em"] is None:  # not asked, or every question lost to a failing service
        return "–"
    return f"{row['em']:.3f} [{row['em_low']:.3f}, {row['em_high']:.3f}]"
