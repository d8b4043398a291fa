"""A few accepted and rejected questions for a person to read, spread over hops or reasons for refusal."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from data.pairs import Pair, trajectory_of
from data.selection import RefusedSample, Rejection, Selection
from data.spread import spread
from verl_ext.method.answers import contains_answer, normalize_answer
from verl_ext.method.format_score import retrieved_passages
from verl_ext.method.trajectory import Trajectory

SHOWN = 3  # questions of each kind
_AROUND = 160  # characters of a text shown on each side of the answer


@dataclass(frozen=True)
class Example:
    """One question as a reader should see it."""

    hop: int
    doc_id: str
    question: str | None
    answer: str | None
    reason: str  # why it was refused, or what supports it
    evidence: str  # the text around the answer, or the document's beginning


@dataclass(frozen=True)
class Examples:
    """Up to SHOWN of each kind."""

    accepted: list[Example]
    rejected: list[Example]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Examples":
        """Read the JSON form. Missing kinds are empty. Raises ValueError for anything else."""
        return msgspec.convert({kind: data.get(kind) or [] for kind in ("accepted", "rejected")}, cls)


def of_selection(
    selection: Selection,
    prompts: Mapping[int, Mapping[str, Any]],
    records: Iterable[Mapping[str, Any]],
    speaks_for: Callable[[Pair], str] | None = None,
) -> Examples:
    """Return examples of a selection. `speaks_for` says what supports an accepted pair."""
    by_key = {(record["prompt_index"], record["sample"]): record for record in records}
    accepted = []
    for pair in spread(selection.accepted, lambda pair: pair.hop)[:SHOWN]:
        why = speaks_for(pair) if speaks_for else "passed every gate"
        found = evidence(pair.answer, pair.document, pair.trajectory)
        accepted.append(Example(pair.hop, pair.doc_id, pair.question, pair.answer, why, found))

    def shown(rejection: Rejection, sample: RefusedSample) -> Example:
        record = by_key.get((rejection.prompt_index, sample.sample))
        document = str(prompts[rejection.prompt_index]["extra_info"]["document"])
        trajectory = trajectory_of(record) if record else Trajectory()
        found = evidence(sample.answer, document, trajectory)
        why = "; ".join(sample.reasons)
        return Example(rejection.hop, rejection.doc_id, sample.question, sample.answer, why, found)

    refused = [(one, sample) for one in selection.rejected for sample in one.samples[:1]]
    chosen = spread(refused, lambda pair: (pair[1].question is None, pair[1].reasons[0].partition(":")[0]))
    return Examples(accepted, [shown(*pair) for pair in chosen[:SHOWN]])


def evidence(answer: str | None, document: str, trajectory: Trajectory) -> str:
    """Return the text around the answer in the document or a passage, else the document's beginning."""
    if answer and normalize_answer(answer):
        for name, text in (("document", document), *(("found", t) for t in retrieved_passages(trajectory))):
            if contains_answer(text, answer):
                return f"{name}: {_around(text, answer)}"
    return f"document, without the answer: {_around(document, '')}"


def _around(text: str, answer: str) -> str:
    line = " ".join(text.replace("\n", ": ", 1).split())  # a document's first line is its title
    place = max(line.lower().find(answer.lower().strip()), 0)
    start, end = max(place - _AROUND, 0), place + len(answer) + _AROUND
    return f"{'…' if start else ''}{line[start:end].strip()}{'…' if end < len(line) else ''}"
