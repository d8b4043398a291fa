"""Lets the solver try a challenger's question and scores it, for the training reward and the preview."""

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.answers import same_answer
from verl_ext.method.challenger_reward import challenger_reward, extract_pair, has_integrity, open_book_fault
from verl_ext.method.format_score import hop_fault
from verl_ext.method.trajectory import Trajectory

Read = Callable[[str, str, Trajectory], Awaitable[SolverAttempt]]  # of question, document, trajectory


async def score_question(
    trajectory: Trajectory,
    document: str,
    hop: int,
    solver: SolverAgent,
    *,
    attempts: int,
    hop_check: bool,
    read: Read | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Score one challenger trajectory as `ChallengerScore`, with counters and the attempts as JSON."""
    question, answer = extract_pair(trajectory)
    refused: str | None = None
    reading: SolverAttempt | None = None
    tried: list[SolverAttempt] = []
    started = time.monotonic()
    # If a search failed, the sample is invalid already and not worth the attempts.
    if question and answer and has_integrity(question, answer) and not trajectory.failed_calls:
        if hop_check and (fault := hop_fault(trajectory, document, hop, question, answer)):
            refused = f"hops: {fault}"
        if read and not refused:
            reading = await read(question, document, trajectory)
            if reading.finished and (fault := open_book_fault(reading.answer, answer)):
                refused = f"open_book: {fault}"
        if not refused and (reading is None or reading.finished):
            tried = await solver.attempts(question, attempts, seed)
    seconds = time.monotonic() - started
    k = right_attempts(tried, answer, attempts)
    score = challenger_reward(trajectory, document, hop, n=attempts, k=k, refused=refused)
    reason = score.reason_invalid
    played = [reading, *tried] if reading else tried
    failures = [attempt.failure for attempt in played if not attempt.finished]
    if reason and failures:
        reason = f"{reason}: {failures[0]}"
    return asdict(score) | {"reason_invalid": reason} | _attempt_fields(tried, answer, seconds)


def right_attempts(attempts: Sequence[SolverAttempt], answer: str | None, n: int) -> int | None:
    """How many of n attempts gave the challenger's answer. None unless all n finished."""
    if answer is None or len(attempts) < n or not all(attempt.finished for attempt in attempts):
        return None
    return sum(same_answer(attempt.answer, [answer]) for attempt in attempts)


def _attempt_fields(attempts: Sequence[SolverAttempt], answer: str | None, seconds: float) -> dict[str, Any]:
    copied = ("answer", "finished", "failure", "searches", "tokens_out")
    records = [
        {
            **{name: getattr(attempt, name) for name in copied},
            "right": answer is not None and same_answer(attempt.answer, [answer]),
            "latency_s": round(attempt.latency_s, 2),
            "trajectory": attempt.trajectory.to_dict(),
        }
        for attempt in attempts
    ]
    return {
        # As text, because veRL averages numbers and passes text through.
        "attempts": json.dumps(records, ensure_ascii=False),
        "attempts_finished": sum(attempt.finished for attempt in attempts),
        "attempts_failed": sum(not attempt.finished for attempt in attempts),
        "attempt_searches": sum(attempt.searches for attempt in attempts),
        "attempt_tokens": sum(attempt.tokens_out for attempt in attempts),
        "attempt_tokens_in": sum(attempt.tokens_in for attempt in attempts),
        "attempts_s": seconds,
    }
