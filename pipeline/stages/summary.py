"""The summary at the end of a training run: a table of its steps, its figures, and the paths of its files."""

import json
from pathlib import Path

from omegaconf import DictConfig

from ops.files import atomic_write
from pipeline.metrics import Steps, is_training, read_metrics
from pipeline.tables import console, new_table
from verl_ext.checkpoints import saved_step, step_folder

_ALARMS = "drzero/collapse/alarms"
"""Only steps that end a whole window of steps have it."""

_ROWS = "drzero/rollout/rows"

_CHALLENGER_COLUMNS = {
    "reward": "drzero/reward/score",
    "diffi-\nculty": "drzero/reward/difficulty",
    "format": "drzero/reward/format",
    "valid": "drzero/questions/valid_share",
    "searched\nhop ≥ 2": "drzero/rollout/searched_share_multi_hop",
    "pass\nrate": "drzero/solved/pass_rate",
    "some,\nnot all": "drzero/solved/some",
}
_SOLVER_COLUMNS = {
    "exact\nmatch": "drzero/reward/em",
    "F1": "drzero/reward/f1",
    "gave\nanswer": "drzero/reward/answered_share",
    "groups\ndiffer": "drzero/reward/groups_with_variance",
    "searched": "drzero/rollout/searched_share",
    "turns": "drzero/rollout/turns",
    "match,\nvalid.": "drzero/val/em",
}
_COMMON_COLUMNS = {
    "tool\ncalls": "drzero/rollout/tool_calls",
    "drift": "drzero/rollout/token_drift_rate",
    "failures": "drzero/failures/share",
    "alarms": _ALARMS,
    "s/step": "timing_s/step",
}
COLUMNS = {"hrpo": _CHALLENGER_COLUMNS | _COMMON_COLUMNS, "grpo": _SOLVER_COLUMNS | _COMMON_COLUMNS}
"""The table's columns, by method."""


def summarise(steps: Steps, method: str) -> dict[str, float]:
    """The figures that show whether a run trained on real rollouts: shares of all rows, sums of all steps.

    A figure without data is left out: no alarms if no start was long enough for one, no scores of validations
    that failed as a whole.
    """
    trained = {number: step for number, step in steps.items() if is_training(step)}
    figures = _solver_figures(steps) if method == "grpo" else _challenger_figures(trained)
    figures["token_drift_rate"] = _weighted(trained, "drzero/rollout/token_drift_rate")
    figures["steps"] = len(trained)
    figures["rollouts"] = _sum(trained, _ROWS)
    for name in ("rollouts_lost", "rows_invalid", "searches"):
        figures[f"failed_{name}"] = _sum(trained, f"drzero/failures/{name}")
    judged = [step[_ALARMS] for step in trained.values() if _ALARMS in step]
    if judged:
        figures["steps_with_collapse_alarms"] = sum(alarms > 0 for alarms in judged)
    figures["seconds_per_step"] = _sum(trained, "timing_s/step") / max(len(trained), 1)
    return figures


def _challenger_figures(steps: Steps) -> dict[str, float]:
    multi_hop = "drzero/rollout/rows_multi_hop"
    k_of_n = [(name.split("_of_"), count) for name, count in _k_of_n(steps).items()]
    return {
        "reward": _weighted(steps, "drzero/reward/score"),
        "valid_question_share": _weighted(steps, "drzero/questions/valid_share"),
        "searched_share_multi_hop": _weighted(steps, "drzero/rollout/searched_share_multi_hop", multi_hop),
        "questions_some_but_not_all_solve": sum(count for (k, n), count in k_of_n if 0 < int(k) < int(n)),
    }


def _solver_figures(steps: Steps) -> dict[str, float]:
    """With the first and the last validation that have a score, if any has one."""
    validated = [step for step in steps.values() if "drzero/val/em" in step]
    figures = {
        "exact_match": _weighted(steps, "drzero/reward/em"),
        "f1": _weighted(steps, "drzero/reward/f1"),
        "searched_share": _weighted(steps, "drzero/rollout/searched_share"),
    }
    if validated:
        first, last = validated[0], validated[-1]
        figures["validation_exact_match_first"] = first["drzero/val/em"]
        figures["validation_exact_match_last"] = last["drzero/val/em"]
        figures["validation_questions"] = last["drzero/val/rows"]
    if any("drzero/val/failed" in step for step in steps.values()):
        figures["validation_failed"] = _sum(steps, "drzero/val/failed")
    return figures


def print_summary(config: DictConfig) -> dict[str, float]:
    """Print the run's table and figures, and write them to `summary.json`; returns the figures."""
    folder = Path(config.run.dir)
    steps = read_metrics(folder)
    figures = summarise(steps, config.method)
    atomic_write(folder / "summary.json", json.dumps({"figures": figures, "steps": steps}, indent=1))
    columns = COLUMNS[config.method]
    title = f"{config.run.name}: {figures['steps']} steps"
    table = new_table(title, ">step", *(f">{column}" for column in columns))
    for number, step in steps.items():
        table.add_row(str(number), *(f"{step[key]:.3g}" if key in step else "–" for key in columns.values()))
    out = console()
    out.print(table)
    for name, value in figures.items():
        out.print(f"  {name.replace('_', ' '):<34} {value:.3g}")
    if "steps_with_collapse_alarms" not in figures:
        too_short = "not judged: every start was shorter than the window of steps that an alarm needs"
        out.print(f"  {'collapse alarms':<34} {too_short}")
    places = {"checkpoint": step_folder(folder, saved_step(folder))}
    if config.method == "hrpo":
        counts = [f"{name.replace('_of_', '/')}: {count:.0f}" for name, count in _k_of_n(steps).items()]
        out.print(f"  {'solver attempts right (k of n)':<34} {', '.join(counts) or 'none'}")
        # A solver has no export yet: the merge stage makes it.
        places["export"] = Path(config.run.export_dir)
    places |= {
        "rollout dumps": folder / "dumps",
        "metrics": folder / "metrics",
        "logs": folder / "logs",
        "config as run": folder / "resolved.yaml",
    }
    for name, path in places.items():
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        out.print(f"  {name:<34} {shown}", soft_wrap=True)
    return figures


def _weighted(steps: Steps, key: str, weight: str = _ROWS) -> float:
    weighted = sum(step.get(key, 0.0) * step.get(weight, 0.0) for step in steps.values())
    return weighted / (_sum(steps, weight) or 1.0)


def _sum(steps: Steps, key: str) -> float:
    return sum(step.get(key, 0.0) for step in steps.values())


def _k_of_n(steps: Steps) -> dict[str, float]:
    """How many questions k of the solver's n attempts answered right, by `k_of_n`, over all steps."""
    prefix = "drzero/solved/"
    keys = {key for step in steps.values() for key in step if key.startswith(prefix) and "_of_" in key}
    return {key.removeprefix(prefix): _sum(steps, key) for key in sorted(keys)}
