"""A training run's metrics by step, over all its starts, and the tokens that it spent."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drzero.ops.records import JsonTail, Step, shape

Steps = dict[int, dict[str, float]]

ALARMS = "drzero/collapse/alarms"  # only the last step of a whole window has it

_CHALLENGER_COLUMNS = {
    "reward": "drzero/reward/score",
    "difficulty": "drzero/reward/difficulty",
    "format": "drzero/reward/format",
    "valid": "drzero/questions/valid_share",
    "searched,\nhop ≥ 2": "drzero/rollout/searched_share_multi_hop",
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
    "match,\nvalidation": "drzero/val/em",
}
_ENVIRONMENT_COLUMNS = {
    "reward": "drzero/reward/score",
    "solved": "drzero/reward/success",
    "groups\ndiffer": "drzero/reward/groups_with_variance",
    "turns": "drzero/rollout/turns",
    "solved,\nvalidation": "drzero/val/success",
}
_AGENT_COLUMNS = {
    "calls": "drzero/agent/calls",
    "rows": "drzero/agent/rows",
    "begun\nagain": "drzero/agent/begun_again",
}
_COMMON_COLUMNS = {
    "tool\ncalls": "drzero/rollout/tool_calls",
    "drift": "drzero/rollout/token_drift_rate",
    "failures": "drzero/failures/share",
    "alarms": ALARMS,
    "s/step": "timing_s/step",
}
COLUMNS = {
    "hrpo": _CHALLENGER_COLUMNS | _COMMON_COLUMNS,
    "grpo": _SOLVER_COLUMNS | _COMMON_COLUMNS,
    "environment": _ENVIRONMENT_COLUMNS | _COMMON_COLUMNS,
}
"""The columns of the summary's table and the live view, by method."""
PARTS = "drzero/reward/part/"


def columns_of(method: str, steps: Steps) -> dict[str, str]:
    """The columns for a run's steps, with an environment's reward parts and an agent's model calls."""
    columns = dict(COLUMNS[method])
    if method != "environment":
        return columns
    parts = dict.fromkeys(key for step in steps.values() for key in step if key.startswith(PARTS))
    first = {"reward": columns.pop("reward"), "solved": columns.pop("solved")}
    own = {name: key for name, key in _AGENT_COLUMNS.items() if any(key in step for step in steps.values())}
    # A part may have the name of a column.
    return first | {key.removeprefix(PARTS): key for key in parts} | first | own | columns


def metrics_path(folder: Path) -> Path:
    """A new metrics file for this start. veRL would truncate an existing one."""
    metrics = folder / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    return metrics / f"attempt_{len(list(metrics.glob('attempt_*.jsonl'))) + 1:03d}.jsonl"


_MetricsLine = shape({"step": Step, "data": dict[str, Any]})


class MetricsTail:
    """Reads the metrics that all starts of a run log, without values that are no number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._tails: dict[Path, JsonTail] = {}
        self._values: Counter[str] = Counter()

    def stream(self, *, to_end: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and metrics of each new line, in the order of writing, as `JsonTail.stream` takes lines."""
        for path in sorted(self._folder.glob("attempt_*.jsonl")):
            tail = self._tails.setdefault(path, JsonTail(path, _MetricsLine))
            for record in tail.stream(to_end=to_end):
                # veRL writes NaN, such as the mean of nothing, as null.
                data = {name: value for name, value in record["data"].items() if value is not None}
                numbers = {name: value for name, value in data.items() if type(value) in (int, float)}
                self._values[path.name] += len(data) - len(numbers)
                yield record["step"], numbers

    @property
    def unreadable(self) -> dict[str, str]:
        """The lines and values left out so far, by file."""
        return {
            f"metrics/{path.name}": f"{tail.unreadable} lines, {self._values[path.name]} values"
            for path, tail in self._tails.items()
            if tail.unreadable or self._values[path.name]
        }


def read_metrics(folder: Path) -> Steps:
    """Metrics by step over all starts. The last repetition of a step counts. Step 0 is the start model."""
    return steps_of(MetricsTail(folder))


def steps_of(tail: MetricsTail, prefixes: tuple[str, ...] = ("",)) -> Steps:
    """`read_metrics` of a tail, which knows afterwards what it left out, or only its metrics so named."""
    steps: Steps = {}
    for step, data in tail.stream(to_end=True):
        add_step(steps, step, {sys.intern(name): data[name] for name in data if name.startswith(prefixes)})
    return dict(sorted(steps.items()))


def add_step(steps: Steps, step: int, data: dict[str, float]) -> None:
    """Add a line of a metrics file to `steps`, as `read_metrics` does."""
    steps[step] = data if is_training(data) else {**steps.get(step, {}), **data}


def is_training(step: Mapping[str, float]) -> bool:
    """Whether the metrics come from a training step, not only a validation."""
    return "training/global_step" in step


def k_of_n(steps: Steps) -> dict[str, float]:
    """How many questions had k right answers in n attempts, by `k_of_n`, over all steps."""
    prefix = "drzero/solved/"
    keys = {key for step in steps.values() for key in step if key.startswith(prefix) and "_of_" in key}
    return {
        key.removeprefix(prefix): sum(step.get(key, 0.0) for step in steps.values()) for key in sorted(keys)
    }


def spent_tokens(folder: Path) -> int:
    """Tokens of training rollouts and solver attempts over all starts. A repeated step counts twice."""
    names = ("perf/total_num_tokens", "drzero/solver/attempt_tokens", "drzero/solver/attempt_tokens_in")
    return int(
        sum(data.get(name, 0) for _, data in MetricsTail(folder).stream(to_end=True) for name in names)
    )
