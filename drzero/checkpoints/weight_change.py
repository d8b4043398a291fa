"""Measures how far training moved a model's weights, before and after rounding them for the export.

A bf16 number's neighbour is |w|/256 to |w|/128 away. From a start in bf16, rounding loses every change below
half that gap. From a start in float32, rounding may also add a whole gap.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from drzero.checkpoints.weights import FsdpCheckpoint, HfWeights


@dataclass(frozen=True)
class ChangeSize:
    """Share of weights that differ (tied ones counted once), largest and mean |change|."""

    share: float
    max_abs: float
    mean_abs: float


@dataclass(frozen=True)
class WeightChange:
    """Against the start model: the checkpoint in float32, and the export with both sides in its type."""

    weights: int
    trained: ChangeSize
    exported: ChangeSize
    kept: float | None
    """The share of training's step that survived rounding, by projection. None if nothing changed."""


class _Tally:
    def __init__(self) -> None:
        self.count, self.changed, self.max_abs, self.sum_abs = 0, 0, 0.0, 0.0

    def add(self, difference: torch.Tensor) -> None:
        change = difference.abs()
        self.count += change.numel()
        self.changed += int(change.count_nonzero())
        self.max_abs = max(self.max_abs, float(change.max()))
        self.sum_abs += float(change.sum(dtype=torch.float64))

    def result(self) -> ChangeSize:
        return ChangeSize(self.changed / self.count, self.max_abs, self.sum_abs / self.count)


def measure_change(checkpoint: FsdpCheckpoint, export: Path, start: Path) -> WeightChange:
    """Compare checkpoint and export with the start model. Raises CheckError if it lacks a weight."""
    exported_weights, start_weights = HfWeights(export), HfWeights(start)
    trained, exported = _Tally(), _Tally()
    product, square = 0.0, 0.0
    for name in checkpoint.layout.distinct:
        names = checkpoint.layout.tied.get(name, [name])
        before, after = start_weights.find(names), exported_weights.find(names)
        step = checkpoint.tensor(name) - before.float()
        rounded_step = after.float() - before.to(after.dtype).float()
        trained.add(step)
        exported.add(rounded_step)
        product += float((step * rounded_step).sum(dtype=torch.float64))
        square += float((step * step).sum(dtype=torch.float64))
    kept = product / square if square else None
    return WeightChange(trained.count, trained.result(), exported.result(), kept)
