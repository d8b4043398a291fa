"""The score of an episode: its reward, the parts that it is made of, and whether the task is solved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.text import is_number


@dataclass(frozen=True)
class Score:
    """What an episode is worth."""

    reward: float
    """What training maximises: a finite number."""
    success: bool
    """Whether the task is solved: what an evaluation counts, and compares between two models."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """By name, what the reward is made of, and whatever else is worth a curve."""


def score_fault(score: Any) -> str | None:
    """What is wrong with what an environment gave as a score; None if nothing is."""
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
