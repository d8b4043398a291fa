"""A synthesized question with its answer, document and conversation, from a journaled sample record.

`{"prompt_index": 7, "sample": 2, "seed": 91, "trajectory": Trajectory.to_dict(), "tokens_in": …, …}`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.errors import DataError, PairingError
from verl_ext.method.challenger_reward import extract_pair
from verl_ext.method.format_score import format_score
from verl_ext.method.trajectory import Trajectory


@dataclass(frozen=True)
class Pair:
    """One synthesized question with its source."""

    prompt_index: int  # `extra_info.index` of the challenger prompt
    sample: int  # number of the conversation among the prompt's
    seed: int  # sampling seed of the conversation
    hop: int
    doc_id: str
    document: str  # as shown in the challenger's prompt
    question: str
    answer: str
    trajectory: Trajectory
    format_score: float  # in [1/4, 1], see verl_ext.method.format_score


def question_and_answer(trajectory: Trajectory) -> tuple[str | None, str | None]:
    """Return a conversation's question, on one line, and its answer. Missing or blank ones are None."""
    question, answer = extract_pair(trajectory)
    return " ".join((question or "").split()) or None, answer or None


def pair_of(record: Mapping[str, Any], prompt_row: Mapping[str, Any]) -> Pair | str:
    """Return a record's pair, or a reason (`pair: …`). Raises DataError if the record is damaged."""
    extra = prompt_row["extra_info"]
    trajectory = trajectory_of(record)
    if record["prompt_index"] != extra["index"]:
        raise PairingError(
            f"a sample of prompt {record['prompt_index']} was joined with prompt {extra['index']}: "
            "the journal and the prompts file do not belong together"
        )
    question, answer = question_and_answer(trajectory)
    if question is None or answer is None:
        missing = " and no ".join(
            name for name, found in (("question", question), ("answer", answer)) if found is None
        )
        return f"pair: the last turn gives no {missing}"
    return Pair(
        prompt_index=record["prompt_index"],
        sample=record["sample"],
        seed=record["seed"],
        hop=extra["hop"],
        doc_id=extra["doc_id"],
        document=extra["document"],
        question=question,
        answer=answer,
        trajectory=trajectory,
        format_score=format_score(trajectory, extra["document"], extra["hop"], answer).total,
    )


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """Return the conversation of a sample record. Raises DataError if it is damaged."""
    if missing := [key for key in ("prompt_index", "sample", "seed", "trajectory") if key not in record]:
        raise DataError(f"a sample record lacks {', '.join(missing)}: the journal is damaged, sample again")
    try:
        return Trajectory.from_dict(record["trajectory"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"sample {record['sample']} of prompt {record['prompt_index']} has no readable trajectory "
            f"({error!r}): the journal is damaged, sample again"
        ) from error
