"""The challenger's reward: high for questions that the solver sometimes answers (arXiv 2601.07055, eq. 2-5).

    r = 1[0 < k < n] · (n - k) / (n - 1) + f / 2, and 0 without integrity

The open book: the solver answers once, greedily, from the challenger's passages, without searching. A
different answer refuses the question, because its label may be wrong (Search Self-Play, arXiv 2510.18821).
"""

from dataclasses import dataclass
from typing import Literal

from environments.turn_text import after_thinking
from verl_ext.method.answers import contains_answer, extract_last_tag, normalize_answer, same_answer
from verl_ext.method.format_score import format_score, hop_fault
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import Message, PromptForm, solver_messages
from verl_ext.method.search_calls import render_tool_call
from verl_ext.method.trajectory import Trajectory

ATTEMPTS = 5  # per question (paper, table 5)
FORMAT_WEIGHT = 0.5
_STEM_CHARS = 5
IntegrityFault = Literal[
    "no_question", "no_answer", "question_without_words", "answer_without_words", "answer_in_question"
]


@dataclass(frozen=True)
class ChallengerScore:
    """A reward with its components, 0 or None where they could not be computed."""

    score: float
    valid: bool  # False if a service failed: the sample counts nowhere
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
    integrity_fault: IntegrityFault | None = None
    hop_fault: str | None = None  # why a question with integrity has fewer hops than requested
    refused: str | None = None  # which check kept it from the attempts, and why


def extract_pair(trajectory: Trajectory) -> tuple[str | None, str | None]:
    """Question and answer from the last turn, after its thinking. None if missing."""
    text = after_thinking(trajectory.final_text)
    return extract_last_tag(text, "question"), extract_last_tag(text, "answer")


def has_integrity(question: str | None, answer: str | None) -> bool:
    """Whether both have words and the question does not contain the answer."""
    return integrity_fault(question, answer) is None


def integrity_fault(question: str | None, answer: str | None) -> IntegrityFault | None:
    """The first fault, if any. "Oslo's" gives "Oslo" away and "Parisian" Paris, "Norway" not "No"."""
    if question is None:
        return "no_question"
    if answer is None:
        return "no_answer"
    normal_question, normal_answer = normalize_answer(question), normalize_answer(answer)
    if not normal_question:
        return "question_without_words"
    if not normal_answer:
        return "answer_without_words"
    # A word that only begins with a name of some length gives it away, as the gates have it.
    is_name = answer[:1].isupper() and len(normal_answer) >= _STEM_CHARS
    return "answer_in_question" if contains_answer(question, answer, begun=is_name) else None


def difficulty(k: int, n: int) -> float:
    """1 if one attempt of n is right, falling to 0 for n, and 0 for none. May raise ValueError."""
    if n < 2 or not 0 <= k <= n:
        raise ValueError(
            f"{k} right of {n} attempts: there must be at least 2 attempts and 0 to {n} right ones"
        )
    return (n - k) / (n - 1) if 0 < k < n else 0.0


def challenger_reward(
    trajectory: Trajectory,
    document: str,
    hop: int,
    *,
    n: int = ATTEMPTS,
    k: int | None,
    refused: str | None = None,
) -> ChallengerScore:
    """`k` is None if fewer than n attempts finished, or if a check `refused` the question."""
    question, answer = extract_pair(trajectory)
    fault = integrity_fault(question, answer)
    reason = None
    if failed := trajectory.failed_calls:
        reason = f"{len(failed)} of the challenger's searches failed: {failed[0].error}"
    elif fault is None and k is None and refused is None:
        reason = f"fewer than {n} solver attempts finished"
    if fault or question is None or answer is None:  # the last two for mypy
        return ChallengerScore(
            0.0, reason is None, reason, question, answer, False, hop, n, None, integrity_fault=fault
        )
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
        hop_fault=hop_fault(trajectory, document, hop, question, answer),
        refused=refused,
    )


def open_book_messages(
    question: str,
    document: str,
    trajectory: Trajectory,
    form: PromptForm,
    max_turns: int,
    response_limit: int,
) -> list[Message]:
    """The question, followed by the document and the challenger's searches as the solver's own turns."""
    title, _, text = document.partition("\n")
    shown = format_passages([title], [[{"title": title, "text": text}]], response_limit)
    read: list[tuple[tuple[str, ...], str]] = [((title,), shown)]
    read += [(call.queries or (), call.response or "") for call in trajectory.searches]
    messages = solver_messages(question, form, max_turns)
    for queries, response in read:
        call = f"<think>I will search {', '.join(queries)}.</think>\n{render_tool_call(queries)}"
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": response}]
    return messages


def open_book_fault(read: str | None, answer: str) -> str | None:
    """Why the answer that was `read` contradicts the challenger's, or None."""
    if same_answer(read, [answer]):
        return None
    return f"from what the challenger read, the solver answers {read!r}"
