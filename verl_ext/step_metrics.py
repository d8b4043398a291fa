"""What a step's rollouts say, as flat metrics (all names start with `drzero/`).

Rows that a failed service spoiled are counted under `failures/` and appear nowhere else, so that no failure
can pass for a low reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from verl_ext.step_rows import StepRow

REWARD_PARTS = ("score", "difficulty", "format", "think", "tool", "answer_part")


def rollout_metrics(rows: Sequence[StepRow], expected: int) -> dict[str, float]:
    """Tool use, lengths in turns, token drift and failures of one step.

    `expected` is the number of rollouts asked for; a rollout that raised never became a row and is counted as
    lost. Shares are of the rows that count.
    """
    real = [row for row in rows if not row.padding]
    good = [row for row in real if row.counts]
    calls = [call for row in good for call in row.trajectory.calls]
    multi_hop = [row for row in good if row.hop >= 2]
    return _prefixed(
        {
            "failures/rollouts_lost": expected - len(real),
            "failures/rows_invalid": len(real) - len(good),
            "failures/searches": sum(len(row.trajectory.failed_calls) for row in real),
            "failures/share": (expected - len(good)) / expected,
            "rollout/rows": len(good),
            "rollout/rows_multi_hop": len(multi_hop),
            "rollout/turns": _mean([len(row.trajectory.turns) for row in good]),
            "rollout/truncated_turns": sum(turn.truncated for row in good for turn in row.trajectory.turns),
            "rollout/tool_calls": len(calls),
            "rollout/tool_calls_invalid": sum(not call.valid for call in calls),
            "rollout/searched_share": _mean([bool(row.trajectory.searches) for row in good]),
            "rollout/searched_share_multi_hop": _mean([bool(row.trajectory.searches) for row in multi_hop]),
            "rollout/token_drift_rate": _mean([row.token_drift for row in real]),
        }
    )


def challenger_metrics(rows: Sequence[StepRow]) -> dict[str, float]:
    """Reward by component, valid-question share by hop and the solver's k-of-n histogram of one step.

    A valid question is one with integrity: question and answer are there, and the one does not give the other
    away. `solved/k_of_n/…` counts questions; `solved/some` is the share that some but not all attempts solve,
    which is where the difficulty reward comes from.
    """
    good = [row for row in rows if row.counts]
    asked = [row for row in good if row.reward["integrity"]]
    metrics: dict[str, float] = {
        f"reward/{part}": _mean([row.reward[part] for row in good]) for part in REWARD_PARTS
    }
    metrics["questions/valid_share"] = _mean([row.reward["integrity"] for row in good])
    for hop in sorted({row.hop for row in good}):
        of_hop = [row for row in good if row.hop == hop]
        metrics[f"questions/valid_share_hop_{hop}"] = _mean([row.reward["integrity"] for row in of_hop])
        metrics[f"reward/score_hop_{hop}"] = _mean([row.reward["score"] for row in of_hop])
    if asked:
        n = int(asked[0].reward["n"])
        for k in range(n + 1):
            metrics[f"solved/{k}_of_{n}"] = sum(row.reward["k"] == k for row in asked)
        metrics["solved/pass_rate"] = _mean([row.reward["k"] / n for row in asked])
        metrics["solved/some"] = _mean([0 < row.reward["k"] < n for row in asked])
    for name in ("attempts_finished", "attempts_failed", "attempt_searches", "attempt_tokens"):
        metrics[f"solver/{name}"] = sum(row.reward.get(name, 0) for row in rows if not row.padding)
    metrics["time/solver_attempts_mean_s"] = _mean([row.reward.get("attempts_s", 0.0) for row in good])
    return _prefixed(metrics)


def progress_line(metrics: Mapping[str, float], step: int, steps: int) -> str:
    """One line a person can follow a run by."""
    parts = {
        "reward": "drzero/reward/score",
        "valid": "drzero/questions/valid_share",
        "searched": "drzero/rollout/searched_share",
        "solved": "drzero/solved/pass_rate",
        "failures": "drzero/failures/share",
        "seconds": "timing_s/step",
    }
    told = ", ".join(f"{name} {metrics[key]:.2f}" for name, key in parts.items() if key in metrics)
    return f"step {step}/{steps}: {told}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"drzero/{name}": float(value) for name, value in metrics.items()}
