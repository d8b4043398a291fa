"""The challenger's reward: high for questions that the solver sometimes answers.

From arXiv 2601.07055, equations 2 to 5:

    r = 1[0 < k < n] · (n - k) / (n - 1) + f / 2

with k of n solver attempts right and f the format score; r = 0 for a question without integrity. The reward
has three steps, so that the caller can run the attempts in between:

    question, answer = extract_pair(trajectory)
    if has_integrity(question, answer): k = number of right attempts of n, None unless all n finished
    score = challenger_reward(trajectory, document, hop, n=n, k=k)

A bad question is the model's mistake: it scores 0 and counts in its group's statistics. A failing service is
not: such a sample is invalid, left out of the statistics and counted as a failure.
"""

from dataclasses import dataclass

from verl_ext.method.answers import after_thinking, extract_last_tag, normalize_answer
from verl_ext.method.format_score import format_score
from verl_ext.method.trajectory import Trajectory

ATTEMPTS = 5
"""Solver attempts per question (paper, table 5)."""
FORMAT_WEIGHT = 0.5


@dataclass(frozen=True)
class ChallengerScore:
    """A reward with its components; those that could not be computed are 0 or None."""

    score: float
    valid: bool
    """False when a service failed: the sample must stay out of every statistic."""
    reason_invalid: str | None
    question: str | None
    answer: str | None
    integrity: bool
    hop: int
    n: int
    k: int | None
    difficulty: float = 0.0
    format: float = 0.0
    think: float = 0.0
    tool: float = 0.0
    answer_part: float = 0.0


def extract_pair(trajectory: Trajectory) -> tuple[str | None, str | None]:
    """Question and answer from the last turn, after its thinking; None for a missing one."""
    text = after_thinking(trajectory.final_text)
    return extract_last_tag(text, "question"), extract_last_tag(text, "answer")


def has_integrity(question: str | None, answer: str | None) -> bool:
    """Whether both exist and are not empty, and the question does not contain the answer.

    The answer may not occur anywhere in the question, word boundary or not: "Oslo's" gives "Oslo" away too.
    """
    if question is None or answer is None:
        return False
    normal_question, normal_answer = normalize_answer(question), normalize_answer(answer)
    return bool(normal_question and normal_answer) and normal_answer not in normal_question


def difficulty(k: int, n: int) -> float:
    """1[0 < k < n] · (n - k) / (n - 1): 1 when one attempt of n is right, 0 when none or all are.

    Raises ValueError unless n >= 2 and 0 <= k <= n.
    """
    if n < 2 or not 0 <= k <= n:
        raise ValueError(
            f"{k} right of {n} attempts: there must be at least 2 attempts and 0 to {n} right ones"
        )
    return (n - k) / (n - 1) if 0 < k < n else 0.0


def challenger_reward(
    trajectory: Trajectory, document: str, hop: int, *, n: int = ATTEMPTS, k: int | None
) -> ChallengerScore:
    """Score one trajectory.

    `document` is the text that the challenger was shown, `hop` the hop count requested. `k` is the number of
    right attempts of `n`, or None when fewer than n attempts finished (or none ran, without integrity).
    """
    question, answer = extract_pair(trajectory)
    integrity = has_integrity(question, answer)
    reason = None
    if failed := trajectory.failed_calls:
        reason = f"{len(failed)} of the challenger's searches failed: {failed[0].error}"
    elif integrity and k is None:
        reason = f"fewer than {n} solver attempts finished"
    if not integrity or answer is None:
        return ChallengerScore(0.0, reason is None, reason, question, answer, False, hop, n, None)
    form = format_score(trajectory, document, hop, answer)
    hardness = 0.0 if k is None else difficulty(k, n)
    return ChallengerScore(
        score=0.0 if reason else hardness + FORMAT_WEIGHT * form.total,
        valid=reason is None,
        reason_invalid=reason,
        question=question,
        answer=answer,
        integrity=True,
        hop=hop,
        n=n,
        k=k,
        difficulty=hardness,
        format=form.total,
        think=form.think,
        tool=form.tool,
        answer_part=form.answer,
    )
