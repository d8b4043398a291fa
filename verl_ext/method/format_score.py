"""The format score of a challenger trajectory: f = (1 + think + tool + answer) / 4, in [1/4, 1].

The constant 1 is for integrity: a trajectory without a proper question and answer has no format score.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.method.answers import contains_answer, normalize_answer
from verl_ext.method.passages import shown_passages
from verl_ext.method.trajectory import Trajectory

_OPENS_WITH_THINKING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class FormatScore:
    """The three parts, each in [0, 1]."""

    think: float
    tool: float
    answer: float

    @property
    def total(self) -> float:
        """f = (1 + think + tool + answer) / 4."""
        return (1 + self.think + self.tool + self.answer) / 4


def format_score(trajectory: Trajectory, document: str, hop: int, answer: str) -> FormatScore:
    """Score a trajectory whose question has integrity; `document` is the text the challenger was shown."""
    retrieved = [line for call in trajectory.searches for line in shown_passages(call.response or "")]
    evidence = [document, *retrieved]
    return FormatScore(think_part(trajectory), tool_part(trajectory, hop), answer_part(answer, evidence))


def think_part(trajectory: Trajectory) -> float:
    """Share of assistant turns that open with a closed think block; 0 without turns."""
    if not trajectory.turns:
        return 0.0
    thinking = sum(_OPENS_WITH_THINKING.match(turn.text) is not None for turn in trajectory.turns)
    return thinking / len(trajectory.turns)


def tool_part(trajectory: Trajectory, hop: int) -> float:
    """1 for one hop; else min((1 + valid calls) / hop, 1), but 0 without calls or with an unanswered one."""
    if hop == 1:
        return 1.0
    calls = [call for call in trajectory.calls if call.valid]
    if not calls or not all(call.answered for call in calls):
        return 0.0
    return min((1 + len(calls)) / hop, 1.0)


def answer_part(answer: str, evidence: Sequence[str]) -> float:
    """1 for an answer of 1 to 5 normalised words found in a text (or yes/no), 0.5 for 6 to 10, else 0."""
    normal = normalize_answer(answer)
    words = len(normal.split())
    supported = normal in ("yes", "no") or any(contains_answer(text, answer) for text in evidence)
    if not supported or words > 10:
        return 0.0
    return 1.0 if words <= 5 else 0.5
