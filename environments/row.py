"""A row of a taskset: the one task that an episode is about."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]
"""What is trained on, and what is held out for evaluation: a taskset gives no row for both."""


@dataclass(frozen=True)
class Row:
    """One task, as it travels to the process that plays it."""

    id: str
    """Unique in its taskset, and the same in every run: two evaluations are compared row by row."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the episode is made of, as JSON."""
