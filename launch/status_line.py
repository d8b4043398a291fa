"""One line on how far a launch is: step, reward, time, cost so far against the limit."""

from __future__ import annotations

from pathlib import Path

from launch.request import Request
from launch.volumes import place
from pipeline.summary import read_metrics
from verl_ext.checkpoints import saved_step

_SCORES = {"drzero/reward/score": "reward", "drzero/reward/em": "exact match"}


def status_line(request: Request, usd: float, seconds: float) -> str:
    """`step 12, reward 0.54, checkpoint of step 10, 1 h 05 min, $13.20 of $130.00`."""
    parts = [*_training(request), _duration(seconds)]
    limit = request.compute.max_usd
    parts.append(f"${usd:.2f}" + (f" of ${limit:.2f}" if limit else ""))
    return ", ".join(parts)


def _training(request: Request) -> list[str]:
    folder = _current_run(request)
    if folder is None:
        return [request.name]
    steps = read_metrics(folder)
    if not steps:
        return [f"{folder.name}: no step yet"]
    step, metrics = max(steps.items())
    scores = [f"{word} {metrics[key]:.3g}" for key, word in _SCORES.items() if key in metrics]
    return [f"{folder.name}: step {step}", *scores, f"checkpoint of step {saved_step(folder)}"]


def _current_run(request: Request) -> Path | None:
    """The training run that it is about; of a loop the one that was written to last."""
    root = place("checkpoints")
    runs = [root / request.name] if request.action != "evolve" else root.glob("*_iter*")
    known = [run for run in runs if (run / "metrics").is_dir()]
    return max(known, key=lambda run: (run / "metrics").stat().st_mtime, default=None)


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
