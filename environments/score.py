"""The score of an episode: its reward, the reward's parts, and whether the task is solved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.text import is_number


@dataclass(frozen=True)
class Score:
    """The score of an episode."""

    reward: float  # Finite. Training maximises it.
    success: bool  # Whether the task is solved. Evaluations count this and compare it between models.
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's parts by name, and anything else worth a curve."""


def score_fault(score: Any) -> str | None:
    """The fault of an environment's score, or None."""
    if not isinstance(score, Score):
        return f"a score is of the class Score, not {_shown(score)}"
    if not is_number(score.reward):
        return f"a reward is a finite number, not {_shown(score.reward)}"
    if not isinstance(score.success, bool):
        return f"success is true or false, not {_shown(score.success)}"
    if not isinstance(score.parts, Mapping):
        return f"parts are a mapping from names to numbers, not {_shown(score.parts)}"
    for name, value in score.parts.items():
        if not isinstance(name, str) or not is_number(value):
            return f"the part {name!r} of a reward is a finite number, not {_shown(value)}"
    return None


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:80]} ({type(value).__name__})"
