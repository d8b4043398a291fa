"""A row of a taskset: the task of an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]  # For training, or held out for evaluation. No row is in both.


@dataclass(frozen=True)
class Row:
    """One task, as it travels to the process that plays it."""

    id: str  # unique in its taskset and stable between runs, so that evaluations can be compared row by row
    data: Mapping[str, Any] = field(default_factory=dict)  # everything the episode needs, as JSON
