"""A verdict on one mechanism of a run: proven or not, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One line of the smoke test."""

    mechanism: str
    proven: bool
    why: str
    """What was seen; of a mechanism that is not proven, what was wrong or missing."""
    needed: bool = True
    """Whether the run cannot do without it."""

    @property
    def fails(self) -> bool:
        """Whether the smoke test fails by it."""
        return self.needed and not self.proven

    def __str__(self) -> str:
        spared = "" if self.proven or self.needed else " (the run does without it)"
        return f"{'proven' if self.proven else 'not proven':<12}{self.mechanism}: {self.why}{spared}"
