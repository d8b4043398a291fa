"""The solver's reward: 1 when its answer matches a target exactly, else 0 (arXiv 2601.07055).

An attempt that ends without an answer is wrong, and so is one that repeats its answer or is cut off: rewarded
for it, a policy learns never to end its turn. One that lost a search to a failing service is invalid: it is
left out of the statistics and counted as a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.method.answers import after_thinking, exact_match, extract_last_tag, f1
from verl_ext.method.trajectory import Trajectory


@dataclass(frozen=True)
class SolverScore:
    """A reward and what it was computed from."""

    score: float
    valid: bool
    """False when a service failed: the sample must stay out of every statistic."""
    reason_invalid: str | None
    answer: str | None
    f1: float
    """Token F1, for reports only."""


def solver_answer(trajectory: Trajectory) -> str | None:
    """The answer in the last turn, after its thinking; None if it gives none or several, or was cut off."""
    said = after_thinking(trajectory.final_text)
    if said.count("<answer>") > 1 or (trajectory.turns and trajectory.turns[-1].truncated):
        return None
    return extract_last_tag(said, "answer")


def solver_reward(trajectory: Trajectory, targets: Sequence[str]) -> SolverScore:
    """Score one attempt against the accepted answers; raises ValueError without any."""
    if not targets:
        raise ValueError(
            "a question without target answers cannot be scored: check reward_model.ground_truth.target"
        )
    answer = solver_answer(trajectory)
    failed = trajectory.failed_calls
    reason = f"{len(failed)} searches failed: {failed[0].error}" if failed else None
    right = reason is None and exact_match(answer, targets)
    return SolverScore(float(right), reason is None, reason, answer, f1(answer, targets))
