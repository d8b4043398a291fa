"""The result of a check: a row of the table, and the cases behind it."""

from dataclasses import dataclass, field
from typing import Any

Case = dict[str, Any]  # a record of worst.jsonl


@dataclass(frozen=True)
class Tolerances:
    """The limits of a pass. Log-probabilities are in nats."""

    tie: float  # ids whose log-probabilities are this close count as equally probable
    mean_gap: float
    largest_gap: float
    differing_share: float
    score_gap: float
    least_p: float


@dataclass(frozen=True)
class Comparison:
    """One check. `passed` is None if it could not judge."""

    name: str
    found: str
    limit: str
    passed: bool | None
    advice: str = ""  # where to look if it failed
    cases: list[Case] = field(default_factory=list)  # worst first

    @property
    def verdict(self) -> str:
        """PASS, FAIL or not judged."""
        return {True: "PASS", False: "FAIL", None: "not judged"}[self.passed]
