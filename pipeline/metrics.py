"""A training run's metrics by step, over all its starts, and the tokens that it spent."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

Steps = dict[int, dict[str, float]]


def metrics_path(folder: Path) -> Path:
    """A new metrics file for this start of the run: veRL truncates an existing one."""
    metrics = folder / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    return metrics / f"attempt_{len(list(metrics.glob('attempt_*.jsonl'))) + 1:03d}.jsonl"


def read_metrics(folder: Path) -> Steps:
    """Metrics by step over all starts of the run; of a repeated step the last repetition counts.

    A validation at the start of a run has a line of its own, which is merged into its step (step 0 for the
    start model). The last line of a killed start may be cut off; it belongs to no complete step and is
    skipped.
    """
    steps: Steps = {}
    for step, data in _logged(folder):
        steps[step] = data if is_training(data) else {**steps.get(step, {}), **data}
    return dict(sorted(steps.items()))


def _logged(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Every complete line of all starts, in the order of writing."""
    for path in sorted((folder / "metrics").glob("attempt_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                yield int(record["step"]), record["data"]


def is_training(step: Mapping[str, float]) -> bool:
    """Whether a step's metrics are of a training step, not of a validation alone."""
    return "training/global_step" in step


def spent_tokens(folder: Path) -> int:
    """Tokens of all training rollouts and of the solver attempts in their rewards; without validations.

    Counted over all starts, as time is: a repeated step has cost its tokens twice.
    """
    names = ("perf/total_num_tokens", "drzero/solver/attempt_tokens", "drzero/solver/attempt_tokens_in")
    return int(sum(data.get(name, 0) for _, data in _logged(folder) for name in names))
