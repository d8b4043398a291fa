"""Chooses each prompt's sample with the best format score that passes all gates, or rejects the prompt.

Duplicates are judged in index order, so the order in which samples finished does not matter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from data.errors import DataError
from data.gates import Gates
from data.pairs import Pair, pair_of, question_and_answer, trajectory_of

Record = Mapping[str, Any]  # a sample record, see data/pairs.py


@dataclass(frozen=True)
class RefusedSample:
    """A refused sample with every reason."""

    sample: int
    question: str | None
    answer: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Rejection:
    """A prompt without a pair. `samples` may be empty."""

    prompt_index: int
    hop: int
    doc_id: str
    samples: tuple[RefusedSample, ...]

    @property
    def reason(self) -> str:
        """Why there is no pair, in one phrase."""
        return "every sample was refused" if self.samples else "no sample: services failed"

    def to_dict(self) -> dict[str, Any]:
        """Return a line of the rejects file."""
        return asdict(self) | {"reason": self.reason}


@dataclass(frozen=True)
class Selection:
    """Accepted pairs and rejected prompts in index order. Each prompt is in exactly one list."""

    accepted: list[Pair]
    rejected: list[Rejection]
    counts: dict[str, Any]
    """`prompts`, `samples`, `pairs`, `accepted`, `rejected`, and for `gates` the pairs judged and refused."""


@dataclass
class _Candidates:
    """One prompt's samples: pairs that passed every per-pair gate, and refused samples."""

    index: int
    hop: int
    doc_id: str
    pairs: list[Pair] = field(default_factory=list)
    refused: list[RefusedSample] = field(default_factory=list)
    per_pair: list[dict[str, str]] = field(default_factory=list)  # reasons against each pair, by gate
    across_pairs: list[dict[str, str]] = field(default_factory=list)  # by gate, given the accepted pairs


def select(
    records_by_prompt: Mapping[int, Sequence[Record]], prompts: Sequence[Mapping[str, Any]], gates: Gates
) -> Selection:
    """Choose a pair for each of `prompts`. Raises DataError if records do not fit them."""
    rows = prompts_by_index(prompts)
    if strange := sorted(set(records_by_prompt) - set(rows)):
        raise DataError(
            f"there are samples of prompt {strange[0]}, which is not among the {len(rows)} prompts: "
            "the journal and the prompts file do not belong together"
        )
    candidates = [_candidates(rows[index], records_by_prompt.get(index, ()), gates) for index in sorted(rows)]
    accepted, rejected = _choose(candidates, gates)
    alone = [reasons for found in candidates for reasons in found.per_pair]
    across = [reasons for found in candidates for reasons in found.across_pairs]
    judged = dict.fromkeys(gates.per_pair, alone) | dict.fromkeys(gates.across_pairs, across)
    refused = {name: sum(name in reasons for reasons in all_of) for name, all_of in judged.items()}
    counts = {
        "prompts": len(rows),
        "samples": sum(map(len, records_by_prompt.values())),
        "pairs": len(alone),
        "accepted": len(accepted),
        "rejected": len(rejected),
        "gates": {
            **{name: {"judged": len(judged[name]), "refused": count} for name, count in refused.items()},
            **{name: {"judged": 0, "refused": 0, "note": why} for name, why in gates.idle.items()},
        },
    }
    return Selection(accepted, rejected, counts)


def prompts_by_index(prompts: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the prompt rows by `extra_info.index`. Raises DataError if two share one."""
    numbers = Counter(row["extra_info"]["index"] for row in prompts)
    if twice := [index for index, count in numbers.items() if count > 1]:
        raise DataError(f"{len(twice)} prompts share an index with another ({twice[0]}): prepare them again")
    return {row["extra_info"]["index"]: row for row in prompts}


def _candidates(row: Mapping[str, Any], records: Sequence[Record], gates: Gates) -> _Candidates:
    extra = row["extra_info"]
    found = _Candidates(extra["index"], extra["hop"], extra["doc_id"])
    ordered = sorted(records, key=lambda record: record["sample"])
    for one, other in pairwise(ordered):
        if one["sample"] == other["sample"]:
            name = f"sample {one['sample']} of prompt {found.index}"
            raise DataError(f"{name} occurs twice: the journal is damaged, sample again")
    for record in ordered:
        pair = pair_of(record, row)
        if isinstance(pair, str):
            question, answer = question_and_answer(trajectory_of(record))
            found.refused.append(RefusedSample(record["sample"], question, answer, (pair,)))
            continue
        reasons = gates.judge(pair)
        found.per_pair.append(reasons)
        if reasons:
            found.refused.append(_refused(pair, reasons))
        else:
            found.pairs.append(pair)
    return found


def _choose(candidates: Sequence[_Candidates], gates: Gates) -> tuple[list[Pair], list[Rejection]]:
    before = gates.accepted([pair for found in candidates for pair in found.pairs])
    accepted: list[Pair] = []
    rejected: list[Rejection] = []
    for found in candidates:
        passed = []
        for pair in found.pairs:
            reasons = gates.judge_across(pair, before)
            found.across_pairs.append(reasons)
            if reasons:
                found.refused.append(_refused(pair, reasons))
            else:
                passed.append(pair)
        if passed:
            best = min(passed, key=lambda pair: (-pair.format_score, pair.sample))
            before.add(best)
            accepted.append(best)
        else:
            samples = tuple(sorted(found.refused, key=lambda sample: sample.sample))
            rejected.append(Rejection(found.index, found.hop, found.doc_id, samples))
    return accepted, rejected


def _refused(pair: Pair, reasons: Mapping[str, str]) -> RefusedSample:
    return RefusedSample(pair.sample, pair.question, pair.answer, tuple(reasons.values()))
