"""Metrics of a step and of a validation, all named `drzero/…`. Spoiled rows count only under `failures/`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from verl_ext.method.challenger_reward import IntegrityFault

if TYPE_CHECKING:  # readers need neither TransferQueue nor Ray
    from verl_ext.trainer.step_rows import StepRow


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, or 0 of nothing."""
    return fmean(values) if values else 0.0


def rollout_metrics(rows: Sequence[StepRow], expected: int) -> dict[str, float]:
    """Tool use, turns, drift and failures. Of `expected` rollouts, those that raised have no row."""
    real = [row for row in rows if not row.padding]
    good = [row for row in real if row.counts]
    played, counted = count_rollouts(real), count_rollouts(good)
    turns = [turn for row in good for turn in row.own_turns]
    calls = [call for turn in turns for call in turn.calls]
    multi_hop = [row for row in good if row.hop >= 2]
    metrics = {
        "failures/rollouts_lost": expected - played,
        "failures/rows_invalid": played - counted,
        "failures/searches": sum(len(row.trajectory.failed_calls) for row in real),
        "failures/share": (expected - counted) / expected,
        "rollout/rows": len(good),
        "rollout/rows_multi_hop": len(multi_hop),
        "rollout/turns": mean([len(row.trajectory.turns) for row in good]),
        "rollout/truncated_turns": sum(turn.truncated for turn in turns),
        "rollout/tool_calls": len(calls),
        "rollout/tool_calls_invalid": sum(not call.valid for call in calls),
        "rollout/searched_share": mean([bool(row.trajectory.searches) for row in good]),
        "rollout/token_drift_rate": mean([row.token_drift for row in real]),
    }
    if multi_hop:  # 0 would read as if none had searched
        searched = [bool(row.trajectory.searches) for row in multi_hop]
        metrics["rollout/searched_share_multi_hop"] = mean(searched)
    return _prefixed(metrics)


def count_rollouts(rows: Sequence[StepRow]) -> int:
    """Number of rollouts. One may have several branches, each of them a row."""
    return len({row.rollout for row in rows})


def challenger_metrics(rows: Sequence[StepRow]) -> dict[str, float]:
    """Rewards by component, valid questions by hop, and the histogram of k of n (docs/metrics.md)."""
    good = [row for row in rows if row.counts]
    asked = [row for row in good if row.reward["integrity"]]
    parts = ("score", "difficulty", "format", "think", "tool", "answer_part")
    metrics: dict[str, float] = {f"reward/{part}": mean([row.reward[part] for row in good]) for part in parts}
    metrics["questions/valid_share"] = mean([row.reward["integrity"] for row in good])
    faults = Counter(row.reward["integrity_fault"] for row in good)
    metrics |= {f"questions/{fault}": faults[fault] for fault in get_args(IntegrityFault)}
    for hop in sorted({row.hop for row in good}):
        of_hop = [row for row in good if row.hop == hop]
        metrics[f"questions/valid_share_hop_{hop}"] = mean([row.reward["integrity"] for row in of_hop])
        metrics[f"reward/score_hop_{hop}"] = mean([row.reward["score"] for row in of_hop])
    if multi_hop := [row for row in asked if row.hop >= 2]:
        metrics["questions/hops_hold_share"] = mean([row.reward["hop_fault"] is None for row in multi_hop])
    if tried := [row for row in asked if row.reward["k"] is not None]:
        n = int(tried[0].reward["n"])
        for k in range(n + 1):
            metrics[f"solved/{k}_of_{n}"] = sum(row.reward["k"] == k for row in tried)
        metrics["solved/pass_rate"] = mean([row.reward["k"] / n for row in tried])
        metrics["solved/some"] = mean([0 < row.reward["k"] < n for row in tried])
    counted = ("attempts_finished", "attempts_failed", "attempt_searches")
    for name in (*counted, "attempt_tokens", "attempt_tokens_in"):
        metrics[f"solver/{name}"] = sum(row.reward.get(name, 0) for row in rows if not row.padding)
    metrics["time/solver_attempts_mean_s"] = mean([row.reward.get("attempts_s", 0.0) for row in good])
    return _prefixed(metrics)


def solver_metrics(rows: Sequence[StepRow]) -> dict[str, float]:
    """Exact match, F1, answers given, and the share of prompts whose samples differ in reward."""
    good = [row for row in rows if row.counts]
    metrics = {
        "reward/em": mean([row.reward["score"] for row in good]),
        "reward/f1": mean([row.reward["f1"] for row in good]),
        "reward/answered_share": mean([row.reward["answer"] is not None for row in good]),
        "reward/groups_with_variance": _differing_share(good),
    }
    for hop in sorted({row.hop for row in good if row.hop}):
        metrics[f"reward/em_hop_{hop}"] = mean([row.reward["score"] for row in good if row.hop == hop])
    return _prefixed(metrics)


def _differing_share(rows: Sequence[StepRow]) -> float:
    """Among the prompts with at least two rows."""
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt, []).append(row.reward["score"])
    return mean([min(scores) < max(scores) for scores in by_prompt.values() if len(scores) > 1])


def environment_metrics(rows: Sequence[StepRow]) -> dict[str, float]:
    """Rewards, their parts and successes of an environment's step, and how its episodes ended."""
    good = list({row.rollout: row for row in rows if row.counts}.values())
    metrics = {
        "reward/score": mean([row.reward["score"] for row in good]),
        "reward/success": mean([row.reward["success"] for row in good]),
        "reward/groups_with_variance": _differing_share(good),
        "environment/undeclared_calls": sum(row.reward["undeclared_calls"] for row in good),
        "environment/cut_off_share": mean([row.reward["ended"] == "tokens" for row in good]),
    }
    parts = _part_means("reward/part", [row.parts for row in good])
    return _prefixed(metrics | parts | _agent_metrics(rows))


def _agent_metrics(rows: Sequence[StepRow]) -> dict[str, float]:
    """Rows and model calls of the episodes of an agent of one's own, and what failed by name."""
    agents = {row.rollout: (row.agent, row.counts) for row in rows if not row.padding and row.agent}
    episodes = [agent for agent, counts in agents.values() if counts]
    if not agents:
        return {}
    n, rows_made = len(episodes), sum(row.counts for row in rows if row.agent)
    calls = sum(len(agent["calls"]) for agent in episodes)
    failed = Counter(fault["name"] for agent, _ in agents.values() for fault in agent["faults"])
    left_out = sum(not counts for _, counts in agents.values())
    return {
        "agent/rows": rows_made / n if n else 0.0,
        "agent/calls": calls / n if n else 0.0,
        "agent/own_row_share": (rows_made - n) / (calls - n) if calls > n else 0.0,
        "agent/begun_again": failed.total() - left_out,
        **{f"{_FAILED}{name}": count for name, count in failed.items()},
    }


def _part_means(prefix: str, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {f"{prefix}/{name}": mean([each[name] for each in parts if name in each]) for name in names}


def challenger_validation(infos: Mapping[str, Sequence[Any]], expected: int) -> dict[str, float]:
    """Like `validation_metrics`, for a challenger, which has no answer to match."""
    return _validation(infos, expected, {"val/score": "score"})


def environment_validation(infos: Mapping[str, Sequence[Any]], expected: int) -> dict[str, float]:
    """Like `validation_metrics`, for any environment: successes, rewards and their parts."""
    metrics = _validation(infos, expected, {"val/success": "success", "val/score": "score"})
    parts = _part_means("val/part", [json.loads(infos["parts"][row]) for row in valid_rows(infos)])
    return metrics | _prefixed(parts)


def validation_metrics(infos: Mapping[str, Sequence[Any]], expected: int) -> dict[str, float]:
    """Exact match and F1, also by hop. `infos` has one list per name that the reward function returned."""
    metrics = _validation(infos, expected, {"val/em": "score", "val/f1": "f1"})
    good = valid_rows(infos)
    hops = infos.get("hop", ())
    for hop in sorted({hops[row] for row in good if hops and hops[row]}):
        of_hop = [row for row in good if hops[row] == hop]
        by_hop = {f"val/em_hop_{hop}": mean([infos["score"][row] for row in of_hop])}
        metrics |= _prefixed(by_hop | {f"val/rows_hop_{hop}": len(of_hop)})
    return metrics


def _validation(
    infos: Mapping[str, Sequence[Any]], expected: int, names: Mapping[str, str]
) -> dict[str, float]:
    good = valid_rows(infos)
    means = {metric: mean([infos[column][row] for row in good]) for metric, column in names.items() if good}
    return _prefixed({"val/rows": len(good), "val/failed": expected - len(good)} | means)


def valid_rows(infos: Mapping[str, Sequence[Any]]) -> list[int]:
    """Indices of the validation rows that no failed service spoiled."""
    return [row for row, valid in enumerate(infos.get("valid", ())) if valid]


_FAILED = "failures/agent/"  # tries of an agent of one's own, by name
_PROGRESS = {
    "reward": "drzero/reward/score",
    "solved tasks": "drzero/reward/success",
    "valid": "drzero/questions/valid_share",
    "exact match": "drzero/reward/em",
    "groups that differ": "drzero/reward/groups_with_variance",
    "searched (hop ≥ 2)": "drzero/rollout/searched_share_multi_hop",
    "solved": "drzero/solved/pass_rate",
    "failures": "drzero/failures/share",
    "seconds": "timing_s/step",
}


def progress_line(metrics: Mapping[str, float], step: int, steps: int) -> str:
    """One step as a line of the console."""
    parts = [f"{name} {metrics[key]:.2f}" for name, key in _PROGRESS.items() if key in metrics]
    failed = [(key, count) for key, count in metrics.items() if key.startswith(f"drzero/{_FAILED}")]
    parts += [f"{key.rpartition('/')[2].replace('_', ' ')} {count:.0f}" for key, count in failed]
    return f"step {step}/{steps}: {', '.join(parts)}"


def validation_line(metrics: Mapping[str, float], step: int) -> str:
    """One validation as a line of the console, without scores if no row counts."""
    scores = {
        "exact match": "drzero/val/em",
        "F1": "drzero/val/f1",
        "solved tasks": "drzero/val/success",
        "reward": "drzero/val/score",
    }
    parts = [f"{name} {metrics[key]:.2f}, " for name, key in scores.items() if key in metrics]
    rows, failed = metrics["drzero/val/rows"], metrics["drzero/val/failed"]
    return f"validation after step {step}: {''.join(parts)}questions {rows:.0f}, failed {failed:.0f}"


def _prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"drzero/{name}": float(value) for name, value in metrics.items()}
