"""Learning curve of a challenger run: reward per step as a plot, and its last quarter against its first.

    python bench/learning_curve.py outputs/checkpoints/learning --out docs/learning.png

Reads the run's rollout dumps. The interval is a bootstrap over questions within each quarter. Questions of a
step share their weights, so it is too narrow for the noise between runs, which only several seeds would show.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESAMPLES = 10_000
PARTS = {"score": "reward", "format": "format score f", "difficulty": "difficulty"}


def read_run(folder: Path) -> dict[int, list[dict[str, float]]]:
    """Reward records by step, without invalid rows, as in training."""
    steps: dict[int, list[dict[str, float]]] = {}
    for path in sorted((folder / "dumps").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps[rows[0]["step"]] = [row["reward"] for row in rows if row["reward"]["valid"]]
    return steps


def quarters(steps: dict[int, list[dict[str, float]]], part: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of one part of the reward in the first and in the last quarter of the steps."""
    numbers = sorted(steps)
    size = max(len(numbers) // 4, 1)
    first, last = numbers[:size], numbers[-size:]
    return tuple(np.array([row[part] for step in group for row in steps[step]]) for group in (first, last))  # type: ignore[return-value]


def difference(first: np.ndarray, last: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean of last minus mean of first, with its bootstrap 95 % interval."""
    rng = np.random.default_rng(seed)
    draws = [
        rng.choice(last, len(last)).mean() - rng.choice(first, len(first)).mean() for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(last.mean() - first.mean()), float(low), float(high)


def plot(steps: dict[int, list[dict[str, float]]], out: Path) -> None:
    """Plot each part per step, with its running mean over five steps as a thick line."""
    numbers = sorted(steps)
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for part, label in PARTS.items():
        means = np.array([np.mean([row[part] for row in steps[step]]) for step in numbers])
        window = min(5, len(means))
        smooth = np.convolve(means, np.ones(window) / window, mode="valid")
        (line,) = axes.plot(numbers[window - 1 :], smooth, linewidth=2, label=label)
        axes.plot(numbers, means, linewidth=0.8, alpha=0.5, color=line.get_color())
    axes.set(xlabel="HRPO step", ylabel="mean over the step's questions", ylim=(0, None))
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=140)


def main() -> None:
    """Plot one run and print its quarters."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/learning.png"))
    options = parser.parse_args()
    steps = read_run(options.run)
    plot(steps, options.out)
    print("| part | first quarter | last quarter | difference | 95 % interval |\n|---|---|---|---|---|")
    for part in ("score", "difficulty", "format", "think", "tool", "answer_part", "integrity"):
        first, last = quarters(steps, part)
        change, low, high = difference(first, last)
        print(
            f"| {part} | {first.mean():.3f} | {last.mean():.3f} | {change:+.3f} | {low:+.3f} to {high:+.3f} |"
        )
    print(f"{len(steps)} steps, {len(first)} questions in the first and {len(last)} in the last quarter")


if __name__ == "__main__":
    main()
