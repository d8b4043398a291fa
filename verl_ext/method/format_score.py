"""The format score of a challenger trajectory: f = (1 + think + tool + answer) / 4, in [1/4, 1]."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.method.answers import contains_answer, normalize_answer, space_characters
from verl_ext.method.passages import passages_by_query, shown_passages
from verl_ext.method.trajectory import Trajectory

_OPENS_WITH_THINKING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class FormatScore:
    """Each part is in [0, 1]."""

    think: float
    tool: float
    answer: float

    @property
    def total(self) -> float:
        """f = (1 + think + tool + answer) / 4."""
        return (1 + self.think + self.tool + self.answer) / 4


def format_score(trajectory: Trajectory, document: str, hop: int, answer: str) -> FormatScore:
    """Score a trajectory with integrity. `document` is the text that the challenger was shown."""
    given = answered_by_document(answer, document, hop)
    found = 0.0 if given else answer_part(answer, [document, *retrieved_passages(trajectory)])
    return FormatScore(think_part(trajectory), tool_part(trajectory, hop), found)


def retrieved_passages(trajectory: Trajectory) -> list[str]:
    """The passages shown by the answered searches, without the queries above them."""
    return [line for call in trajectory.searches for line in shown_passages(call.response or "")]


def think_part(trajectory: Trajectory) -> float:
    """Share of turns that open with a closed think block. 0 without turns."""
    if not trajectory.turns:
        return 0.0
    thinking = sum(_OPENS_WITH_THINKING.match(turn.text) is not None for turn in trajectory.turns)
    return thinking / len(trajectory.turns)


def tool_part(trajectory: Trajectory, hop: int) -> float:
    """1 for one hop, else min((1 + search steps) / hop, 1). 0 without a step or with an unanswered call."""
    if hop == 1:
        return 1.0
    steps = search_steps(trajectory)
    if not steps or not all(call.answered for call in trajectory.calls if call.valid):
        return 0.0
    return min((1 + steps) / hop, 1.0)


def search_steps(trajectory: Trajectory) -> int:
    """Number of turns that got passages for a query, in normal form, that no earlier turn had."""
    steps, asked = 0, {""}
    for turn in trajectory.turns:
        found = {
            normalize_answer(query)
            for call in turn.calls
            if call.answered
            for query, passages in passages_by_query(call.queries or (), call.response or "")
            if passages
        }
        steps += bool(found - asked)
        asked |= found
    return steps


def answered_by_document(answer: str, document: str, hop: int) -> bool:
    """Whether a question of two or more hops ends in its own document. Yes and no never do."""
    return hop >= 2 and normalize_answer(answer) not in ("yes", "no") and contains_answer(document, answer)


def hop_fault(trajectory: Trajectory, document: str, hop: int, question: str, answer: str) -> str | None:
    """Why the question has fewer than `hop` hops, or None."""
    steps = search_steps(trajectory)
    if steps < hop - 1:
        turns = f"{steps} turn{'s' * (steps != 1)}"
        return f"{turns} found passages with a new query, {hop} hops take {hop - 1}"
    if answered_by_document(answer, document, hop):
        return f"the answer stands in the document that {hop} hops should lead away from"
    if hop >= 2 and (query := named_search(trajectory, question, answer)):
        return f"one search for the question's own words {query!r} shows the answer"
    return None


def named_search(trajectory: Trajectory, question: str, answer: str) -> str | None:
    """A query, or None, whose words all occur in the question and whose passages contain the answer."""
    words = set(space_characters(normalize_answer(question)).split())
    for call in trajectory.searches:
        for query, passages in passages_by_query(call.queries or (), call.response or ""):
            named = set(space_characters(normalize_answer(query)).split())
            if named and named <= words and any(contains_answer(passage, answer) for passage in passages):
                return query
    return None


def answer_part(answer: str, evidence: Sequence[str]) -> float:
    """1 for an answer of up to 5 words found in a text (or yes/no), 0.5 for 6 to 10 words, else 0."""
    normal = normalize_answer(answer)
    words = len(normal.split())
    supported = normal in ("yes", "no") or any(contains_answer(text, answer) for text in evidence)
    if not supported or words > 10:
        return 0.0
    return 1.0 if words <= 5 else 0.5
