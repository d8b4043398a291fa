"""The end of a run: one table of what happened per step, what it means, and where everything lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from ops.atomic import atomic_write

Steps = dict[int, dict[str, float]]

COLUMNS = {
    "reward": "drzero/reward/score",
    "difficulty": "drzero/reward/difficulty",
    "format": "drzero/reward/format",
    "valid": "drzero/questions/valid_share",
    "searched,\nhop ≥ 2": "drzero/rollout/searched_share_multi_hop",
    "pass\nrate": "drzero/solved/pass_rate",
    "some,\nnot all": "drzero/solved/some",
    "tool\ncalls": "drzero/rollout/tool_calls",
    "drift": "drzero/rollout/token_drift_rate",
    "failures": "drzero/failures/share",
    "s/step": "timing_s/step",
}


def saved_step(folder: Path) -> int:
    """The step of the run's last complete checkpoint, 0 when there is none."""
    latest = folder / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.is_file() else 0


def metrics_path(folder: Path) -> Path:
    """A new metrics file for this start of the run: veRL truncates the file it is given."""
    metrics = folder / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    return metrics / f"attempt_{len(list(metrics.glob('attempt_*.jsonl'))) + 1:03d}.jsonl"


def read_metrics(folder: Path) -> Steps:
    """Metrics by step over all starts of the run; a step that was run again counts as it went last.

    The last line of a killed start may be cut off; it belongs to no complete step and is left out.
    """
    steps: Steps = {}
    for path in sorted((folder / "metrics").glob("attempt_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                steps[int(record["step"])] = record["data"]
    return dict(sorted(steps.items()))


def summarise(steps: Steps) -> dict[str, float]:
    """The figures that say whether the run was a real one: shares over all questions, sums over all steps."""
    rows, multi_hop = "drzero/rollout/rows", "drzero/rollout/rows_multi_hop"
    figures = {
        "reward": _weighted(steps, "drzero/reward/score", rows),
        "valid_question_share": _weighted(steps, "drzero/questions/valid_share", rows),
        "searched_share_multi_hop": _weighted(steps, "drzero/rollout/searched_share_multi_hop", multi_hop),
        "token_drift_rate": _weighted(steps, "drzero/rollout/token_drift_rate", rows),
    }
    figures["steps"] = len(steps)
    figures["questions"] = sum(step.get(rows, 0.0) for step in steps.values())
    figures["questions_some_but_not_all_solve"] = _some_but_not_all(steps)
    for name in ("rollouts_lost", "rows_invalid", "searches"):
        figures[f"failed_{name}"] = sum(step.get(f"drzero/failures/{name}", 0.0) for step in steps.values())
    figures["seconds_per_step"] = sum(step.get("timing_s/step", 0.0) for step in steps.values()) / max(
        len(steps), 1
    )
    return figures


def print_summary(config: DictConfig) -> None:
    """Print the run's table and figures, and keep them as `summary.json`."""
    folder = Path(config.run.dir)
    steps = read_metrics(folder)
    figures = summarise(steps)
    atomic_write(folder / "summary.json", json.dumps({"figures": figures, "steps": steps}, indent=1))
    console = Console(width=118)
    console.print(_table(steps, config.run.name))
    for name, value in figures.items():
        console.print(f"  {name.replace('_', ' '):<34} {value:.3g}")
    console.print(f"  {'solver attempts right (k of n)':<34} {_histogram(steps)}")
    paths = {
        "checkpoint": folder / f"global_step_{saved_step(folder)}",
        "export": folder / "hf",
        "rollout dumps": folder / "dumps",
        "metrics": folder / "metrics",
        "logs": folder / "logs",
        "config as run": folder / "resolved.yaml",
    }
    for name, path in paths.items():
        console.print(f"  {name:<34} {_shown(path)}", soft_wrap=True)


def _table(steps: Steps, name: str) -> Table:
    table = Table(title=f"{name}: {len(steps)} steps", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("step", justify="right")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for number, step in steps.items():
        table.add_row(str(number), *(_cell(step, key) for key in COLUMNS.values()))
    return table


def _cell(step: Mapping[str, Any], key: str) -> str:
    return f"{step[key]:.3g}" if key in step else "–"


def _weighted(steps: Steps, key: str, weight: str) -> float:
    total = sum(step.get(weight, 0.0) for step in steps.values())
    return (
        sum(step.get(key, 0.0) * step.get(weight, 0.0) for step in steps.values()) / total if total else 0.0
    )


def _k_of_n(steps: Steps) -> dict[str, float]:
    counts: dict[str, float] = {}
    for step in steps.values():
        for key, value in step.items():
            if key.startswith("drzero/solved/") and "_of_" in key:
                name = key.removeprefix("drzero/solved/")
                counts[name] = counts.get(name, 0.0) + value
    return dict(sorted(counts.items()))


def _some_but_not_all(steps: Steps) -> float:
    counts = _k_of_n(steps)
    return sum(
        count for name, count in counts.items() if 0 < int(name.split("_")[0]) < int(name.split("_")[-1])
    )


def _histogram(steps: Steps) -> str:
    return (
        ", ".join(f"{name.replace('_of_', '/')}: {count:.0f}" for name, count in _k_of_n(steps).items())
        or "none"
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
