"""The loop as tables: which stages are finished (`drzero status`), and the solver's scores by iteration."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.loop.manifest import Manifest, StageEntry

_WIDTH = 118
_STATES = {
    "complete": "complete",
    "failed": "stopped",
    "forgotten": "to redo",
    "pending": "–",
    "running": "running",
}


def print_loop(manifest: Manifest, names: Sequence[str], *, running: bool) -> None:
    """One row a stage: state, starts, time, tokens, figures.

    `running`: whether a loop runs now. If none does, a stage recorded as running was killed.
    """
    table = Table(title="self-evolution loop", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("stage", "state", "starts", "minutes", "tokens", "figures"):
        table.add_column(column, justify="right" if column in ("starts", "minutes", "tokens") else "left")
    for name in names:
        entry = manifest.entries.get(name, StageEntry())
        state = "killed" if entry.state == "running" and not running else _STATES[entry.state]
        seconds = entry.seconds + (time.time() - (entry.started or 0) if state == "running" else 0)
        table.add_row(
            name,
            state,
            str(entry.starts or "–"),
            f"{seconds / 60:.1f}" if seconds else "–",
            f"{entry.tokens:,}" if entry.tokens else "–",
            entry.error or ", ".join(f"{key} {_short(value)}" for key, value in entry.figures.items()),
        )
    Console(width=_WIDTH).print(table)


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
    table = Table(title="exact match, 95 % interval", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("benchmark")
    table.add_column("n", justify="right")
    for iteration in reports:
        table.add_column(f"iteration {iteration}" if iteration else "base", justify="right")
    for benchmark in reports[min(reports)]:
        cells = [_score(report.get(benchmark)) for report in reports.values()]
        table.add_row(benchmark, str(reports[min(reports)][benchmark]["n"]), *cells)
    Console(width=_WIDTH).print(table)


def _score(row: Mapping[str, float | None] | None) -> str:
    if row is None or row["em"] is None:  # not asked, or every question lost to a failing service
        return "–"
    return f"{row['em']:.3f} [{row['em_low']:.3f}, {row['em_high']:.3f}]"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
