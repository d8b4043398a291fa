"""Why a trajectory has its reward: each part, its logged value, and the reason in words."""

from collections.abc import Iterator
from dataclasses import dataclass

from drzero.ops.text import counted
from drzero.runs.report.trajectories import Trajectory
from drzero.stages.examples import FAULTS, difficulty
from environments.turn_text import after_thinking
from verl_ext.method.answers import contains_answer, normalize_answer
from verl_ext.method.challenger_reward import FORMAT_WEIGHT
from verl_ext.method.format_score import answered_by_document, retrieved_passages, search_steps, think_part


@dataclass(frozen=True)
class Part:
    """One part of a reward."""

    name: str
    value: float | None
    reason: str


def explain(trajectory: Trajectory) -> list[Part]:
    """The parts in the order they add up, or the gates' verdicts on a sample."""
    if trajectory.score is None or not trajectory.valid:
        why = "its score is no number" if trajectory.valid else "a service failed"
        reason = str(trajectory.reward.get("reason_invalid") or why)
        return [Part("reward", None, f"counts in no statistic: {reason}")]
    if "parts" in trajectory.reward:
        return list(_environment(trajectory))
    if "integrity" in trajectory.reward:
        gates = [Part("gates", None, reason) for reason in trajectory.reasons]  # of a preview
        return [*_challenger(trajectory), *gates]
    if trajectory.reasons or "f1" not in trajectory.reward:
        return [Part("gates", trajectory.score, reason) for reason in trajectory.reasons]
    return list(_solver(trajectory))


def _environment(trajectory: Trajectory) -> Iterator[Part]:
    weights = trajectory.agent.get("weights")
    for name, value in trajectory.parts.items():
        if weights or name != "reward":  # without weights that is the reward itself
            yield Part(name, value, f"weight {weights.get(name, 0):g}" if weights else "")
    yield Part("reward", trajectory.reward.get("score"), _whole_reward(trajectory))


def _whole_reward(trajectory: Trajectory) -> str:
    agent, parts = trajectory.agent, trajectory.parts
    if not agent:
        return "of the environment"
    if paid := agent.get("rewards"):
        return f"the sum of {counted(len(paid), 'call')}"
    if agent.get("weights"):
        return "the parts by their weights"
    return "the mean of the parts" if parts and "reward" not in parts else "as the agent returned it"


def _solver(trajectory: Trajectory) -> Iterator[Part]:
    if trajectory.answer is None:
        reason = _no_answer(trajectory)
    else:
        reason = "the answer is a target" if trajectory.score else "the answer is no target"
        reason += f", normalized “{normalize_answer(trajectory.answer)}”"
    yield Part("exact match", trajectory.score, reason)
    yield Part("f1", trajectory.reward["f1"], "tokens shared with the best target; for reports only")


def _no_answer(trajectory: Trajectory) -> str:
    turns = trajectory.conversation.turns
    if turns and turns[-1].truncated:
        return "the last turn was cut off, so an answer in it does not count"
    if after_thinking(trajectory.conversation.final_text).count("<answer>") > 1:
        return "the last turn gives several answers, which counts as none"
    return "the last turn gives no <answer>"


def _challenger(trajectory: Trajectory) -> Iterator[Part]:
    reward, conversation = trajectory.reward, trajectory.conversation
    if not reward["integrity"]:
        fault = str(reward.get("integrity_fault"))
        yield Part("integrity", 0.0, FAULTS.get(fault, fault))
        yield Part(
            "reward", 0.0, "a question without integrity earns nothing, and the solver does not try it"
        )
        return
    n, k = int(reward["n"]), reward["k"]
    yield Part(
        "difficulty",
        reward["difficulty"],
        _difficulty(int(k), n) if k is not None else f"not tried: {reward.get('refused') or 'no attempts'}",
    )
    turns = len(conversation.turns)
    thinking = round(think_part(conversation) * turns)
    yield Part("think", reward["think"], f"{thinking} of {turns} turns open with closed thinking")
    yield Part("tool", reward["tool"], _tool(trajectory))
    yield Part("answer_part", reward["answer_part"], _answer(trajectory))
    yield Part("format", reward["format"], "f = (1 + think + tool + answer) / 4")
    yield Part("reward", trajectory.score, f"difficulty + {FORMAT_WEIGHT:g} f")


def _difficulty(k: int, n: int) -> str:
    right = f"{k} of {n} solver attempts gave this answer"
    if 0 < k < n:
        return f"{right}: ({n} − {k}) / ({n} − 1)"
    return f"{right}: {difficulty(k, n)}"


def _tool(trajectory: Trajectory) -> str:
    hop, conversation = trajectory.hop, trajectory.conversation
    if hop == 1:
        return "one hop needs no search"
    if any(call.valid and not call.answered for call in conversation.calls):
        return "a search got no passages"
    steps = search_steps(conversation)
    found = f"{steps} turn{'s' * (steps != 1)} found passages with a new query"
    return f"{found}: min((1 + {steps}) / {hop} hops, 1)" if steps else f"{found}, {hop} hops take {hop - 1}"


def _answer(trajectory: Trajectory) -> str:
    answer, document = trajectory.answer or "", trajectory.document or ""
    count = len(normalize_answer(answer).split())
    words = f"{count} word{'s' * (count != 1)}"
    if answered_by_document(answer, document, trajectory.hop):
        return "a question of several hops, but its own document has the answer"
    if normalize_answer(answer) in ("yes", "no"):
        return "yes or no"
    if contains_answer(document, answer):
        return f"its document has the answer, {words}"
    if any(contains_answer(text, answer) for text in retrieved_passages(trajectory.conversation)):
        return f"a retrieved passage has the answer, {words}"
    return "neither its document nor a retrieved passage has the answer"
