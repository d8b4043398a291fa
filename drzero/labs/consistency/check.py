"""What every check of a comparison returns: a row of the table, and the cases behind it."""

from dataclasses import dataclass, field
from typing import Any

Case = dict[str, Any]
"""One place where the sides differ, as a record of worst.jsonl."""


@dataclass(frozen=True)
class Limits:
    """What passes. Log-probabilities are in nats."""

    tie: float
    """Two ids whose log-probabilities are no further apart are equally probable, but for rounding."""
    mean_gap: float
    largest_gap: float
    differing_share: float
    score_gap: float
    least_p: float


@dataclass(frozen=True)
class Check:
    """One row: `passed` is None where the check could not judge."""

    name: str
    found: str
    limit: str
    passed: bool | None
    advice: str = ""
    """Where to look if it failed."""
    cases: list[Case] = field(default_factory=list)
    """The worst first."""

    @property
    def verdict(self) -> str:
        """In one word."""
        return {True: "PASS", False: "FAIL", None: "not judged"}[self.passed]
