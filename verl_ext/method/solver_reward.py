"""The solver's reward: 1 if its answer matches a target exactly, else 0 (arXiv 2601.07055).

An answer that is missing, repeated or cut off is wrong: otherwise a policy would learn never to end its turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from environments.turn_text import after_thinking
from verl_ext.method.answers import exact_match, extract_last_tag, f1, same_answer
from verl_ext.method.trajectory import Trajectory

SYNTHESIZED = "search_zero"  # how the `data_source` of our own pairs begins


@dataclass(frozen=True)
class SolverScore:
    """A reward and its inputs."""

    score: float
    valid: bool  # False if a service failed: the sample counts nowhere
    reason_invalid: str | None
    answer: str | None
    f1: float  # for reports only


def solver_answer(trajectory: Trajectory) -> str | None:
    """The answer in the last turn, after its thinking. None for no answer, several, or a cut-off turn."""
    said = after_thinking(trajectory.final_text)
    if said.count("<answer>") > 1 or (trajectory.turns and trajectory.turns[-1].truncated):
        return None
    return extract_last_tag(said, "answer")


def solver_reward(trajectory: Trajectory, targets: Sequence[str], source: str = "") -> SolverScore:
    """Score one attempt at a row of a `data_source`. Raises ValueError without target answers."""
    if not targets:
        raise ValueError(
            "a question without target answers cannot be scored: check reward_model.ground_truth.target"
        )
    answer = solver_answer(trajectory)
    failed = trajectory.failed_calls
    reason = f"{len(failed)} searches failed: {failed[0].error}" if failed else None
    equal = same_answer if source.startswith(SYNTHESIZED) else exact_match  # a benchmark has SQuAD's rules
    right = reason is None and equal(answer, targets)
    return SolverScore(float(right), reason is None, reason, answer, f1(answer, targets))
