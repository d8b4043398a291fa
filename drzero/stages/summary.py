"""The summary at the end of a training run: its steps, figures and files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drzero.ops.files import atomic_write
from drzero.recipe.metrics import ALARMS, PARTS, Steps, columns_of, is_training, k_of_n, read_metrics
from drzero.recipe.tables import console, print_wide
from drzero.stages.examples import SUMMARY, challenger_examples, print_examples
from verl_ext.checkpoints import saved_step, step_folder
from verl_ext.trainer.collapse import ALARM

_ROWS = "drzero/rollout/rows"
_FAILED = {
    "failed_rollouts_lost": "rollouts lost",
    "failed_rows_invalid": "rows invalid",
    "failed_searches": "searches",
}


def summarise(steps: Steps, method: str) -> dict[str, float]:
    """Figures that show whether a run trained on real rollouts: means over rows, sums over steps."""
    trained = {number: step for number, step in steps.items() if is_training(step)}
    if method == "hrpo":
        means = {"reward": "drzero/reward/score", "valid_question_share": "drzero/questions/valid_share"}
        searched = {"searched_share_multi_hop": "drzero/rollout/searched_share_multi_hop"}
        figures = _means(trained, means) | _means(trained, searched, "drzero/rollout/rows_multi_hop")
        solved = [(name.split("_of_"), count) for name, count in k_of_n(trained).items()]
        sometimes = sum(count for (k, n), count in solved if 0 < int(k) < int(n))
        figures["questions_some_but_not_all_solve"] = sometimes
    elif method == "grpo":
        means = {"exact_match": "drzero/reward/em", "f1": "drzero/reward/f1"}
        figures = _means(steps, means | {"searched_share": "drzero/rollout/searched_share"})
        figures |= _validation_figures(steps, "exact_match", "drzero/val/em", "questions")
    else:
        figures = _environment_figures(steps)
    figures |= _means(trained, {"token_drift_rate": "drzero/rollout/token_drift_rate"})
    figures["steps"] = len(trained)
    figures["rollouts"] = _sum(trained, _ROWS)
    for name in _FAILED:
        figures[name] = _sum(trained, f"drzero/failures/{name.removeprefix('failed_')}")
    judged = [step[ALARMS] for step in trained.values() if ALARMS in step]
    if judged:
        figures["steps_with_collapse_alarms"] = sum(alarms > 0 for alarms in judged)
    for number, step in trained.items():
        for key in step:
            if key.startswith(ALARM):
                figures.setdefault(f"collapse_{key.removeprefix(ALARM).replace('-', '_')}_from_step", number)
    figures["seconds_per_step"] = _sum(trained, "timing_s/step") / max(len(trained), 1)
    return figures


def _environment_figures(steps: Steps) -> dict[str, float]:
    """Reward by part and tasks solved, in training and in the first and last validation."""
    trained = {number: step for number, step in steps.items() if is_training(step)}
    means = {
        "reward": "drzero/reward/score",
        "solved_share": "drzero/reward/success",
        "groups_with_variance": "drzero/reward/groups_with_variance",
    }
    figures = _means(trained, means)
    figures["undeclared_calls"] = _sum(trained, "drzero/environment/undeclared_calls")
    parts = dict.fromkeys(key for step in trained.values() for key in step if key.startswith(PARTS))
    figures |= _means(trained, {f"part_{key.removeprefix(PARTS)}": key for key in parts})
    return figures | _validation_figures(steps, "solved", "drzero/val/success", "rows")


def _validation_figures(steps: Steps, score: str, key: str, rows: str) -> dict[str, float]:
    figures = {}
    if validated := [step for step in steps.values() if key in step]:
        figures[f"validation_{score}_first"] = validated[0][key]
        figures[f"validation_{score}_last"] = validated[-1][key]
        figures[f"validation_{rows}"] = validated[-1]["drzero/val/rows"]
    if any("drzero/val/failed" in step for step in steps.values()):
        figures["validation_failed"] = _sum(steps, "drzero/val/failed")
    return figures


def print_summary(config: DictConfig) -> dict[str, float]:
    """Print the run's table and figures, and write them to `summary.json`. Returns the figures."""
    folder = Path(config.run.dir)
    steps = read_metrics(folder)
    figures = summarise(steps, config.method)
    summary: dict[str, Any] = {"figures": figures, "steps": steps}
    examples = challenger_examples(folder) if config.method == "hrpo" else None
    if examples:
        summary["examples"] = examples.to_dict()
    atomic_write(folder / SUMMARY, json.dumps(summary, indent=1))
    columns = columns_of(config.method, steps)
    title = f"{config.run.name}: {figures['steps']} steps"
    rows = [
        [str(number), *(f"{step[key]:.3g}" if key in step else "–" for key in columns.values())]
        for number, step in steps.items()
    ]
    out = console()
    print_wide(out, title, [">step", *(f">{column}" for column in columns)], rows)
    failed = {name: value for name, value in figures.items() if name in _FAILED}
    shown = {name: value for name, value in figures.items() if name not in (*_FAILED, "steps")}
    lines = {name.replace("_", " "): f"{value:.3g}" for name, value in shown.items()}
    lines["failed"] = ", ".join(f"{_FAILED[name]} {value:.0f}" for name, value in failed.items())
    if "steps_with_collapse_alarms" not in figures:
        lines["collapse alarms"] = "not judged: every start was shorter than an alarm's window of steps"
    places = {"checkpoint": step_folder(folder, saved)} if (saved := saved_step(folder)) else {}
    if config.method == "hrpo":
        counts = [f"{name.replace('_of_', '/')}: {count:.0f}" for name, count in k_of_n(steps).items()]
        lines["solver attempts right (k of n)"] = ", ".join(counts) or "none"
    # A solver is exported by the merge stage, and a stopped run not at all.
    if config.method != "grpo" and (export := Path(config.run.export_dir)).exists():
        places["export"] = export
    places["dumps, metrics, logs, resolved.yaml"] = folder
    for name, path in places.items():
        lines[name] = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    for name, text in lines.items():
        out.print(f"  {name:<38} {text}", soft_wrap=True)
    if examples:
        print_examples(examples, config.run.name)
    return figures


def _means(steps: Steps, keys: Mapping[str, str], weight: str = _ROWS) -> dict[str, float]:
    """Each figure's metric, averaged over the steps that have it, weighted by rows."""
    means = {}
    for name, key in keys.items():
        found = [(step[key], step.get(weight, 0.0)) for step in steps.values() if key in step]
        if total := sum(rows for _, rows in found):
            means[name] = sum(value * rows for value, rows in found) / total
    return means


def _sum(steps: Steps, key: str) -> float:
    return sum(step.get(key, 0.0) for step in steps.values())
