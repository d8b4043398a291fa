"""What a stage shows of its questions at its end and in its report: examples, and what gates refused."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.table import Table
from rich.text import Text

from data.examples import SHOWN, Example, Examples, evidence
from data.selection import Selection
from data.spread import spread
from drzero.ops.notices import plain
from drzero.ops.records import Step, read_json_lines, read_object, shape
from drzero.recipe.tables import console, new_table
from drzero.stages.result import REPORT
from verl_ext.method.trajectory import Trajectory

SUMMARY = "summary.json"  # a training run's figures, steps, and a challenger's examples
_STEPS = 4  # examples come from at most this many last steps
FAULTS = {
    "no_question": "the last turn has no <question>",
    "no_answer": "the last turn has no <answer>",
    "question_without_words": "the question has no words",
    "answer_without_words": "the answer has no words",
    "answer_in_question": "the question contains its answer",
}
"""Why a question has no integrity."""


_COUNT = Annotated[int, msgspec.Meta(ge=0, le=1000)]
_JUDGED = shape({"score": float | None}, valid=bool, answer=str | None, parts=dict[str, float | None] | None)
CHALLENGED = shape(
    {"integrity": bool, "k": _COUNT | None, "n": _COUNT}
    | dict.fromkeys(("difficulty", "think", "tool", "answer_part", "format"), float | None)
)
"""The reward of a challenger's dump."""
DumpLine = shape(
    {"step": Step, "hop": Step | None, "reward": _JUDGED, "trajectory": dict[str, Any]},
    **{"document": str | None, "targets": list[str] | None},
)
"""A line of a dump (docs/dumps.md) as its readers need it."""


def per_hop(rows: Sequence[Mapping[str, Any]], selection: Selection) -> dict[str, dict[str, int]]:
    """How many prompts of each hop count there are, and how many gave a pair."""
    prompts = Counter(row["extra_info"]["hop"] for row in rows)
    accepted = Counter(pair.hop for pair in selection.accepted)
    rejected = Counter(rejection.hop for rejection in selection.rejected)
    return {
        str(hop): {"prompts": prompts[hop], "accepted": accepted[hop], "rejected": rejected[hop]}
        for hop in sorted(prompts)
    }


def gates_table(gates: Mapping[str, Mapping[str, Any]]) -> Table:
    """How many pairs each gate judged and refused."""
    table = new_table("gates, over the samples that are pairs", "gate", ">judged", ">refused", ">share")
    for gate, counts in gates.items():
        share = f"{counts['refused'] / counts['judged']:.1%}" if counts["judged"] else "–"
        table.add_row(gate, str(counts["judged"]), str(counts["refused"]), counts.get("note", share))
    return table


def print_examples(examples: Examples, name: str) -> None:
    """Print both kinds, a few lines each."""
    out = console()
    for title, kind in (("accepted", examples.accepted), ("rejected", examples.rejected)):
        out.print(Text(f"{plain(name)}: {title}", "bold").append("" if kind else ": none", "not bold"))
        for example in kind:
            for line in lines_of(example):
                out.print(line, soft_wrap=True)


def lines_of(example: Example) -> Iterator[str]:
    """One example as two plain lines."""
    question, answer = (plain(part or "–") for part in (example.question, example.answer))
    hops = f"{example.hop} hop{'s' * (example.hop != 1)}"
    yield f"  • {question} → {answer} ({hops}; {plain(example.reason)})"
    yield f"      {plain(example.evidence)}"


def difficulty(k: int, n: int) -> str:
    """How hard a question was that k of n attempts solved."""
    if 0 < k < n:
        return "some right"
    return "too easy" if k else "too hard, or its answer is wrong"


def shortcut(hop: int, solved: Iterable[int]) -> str | None:
    """Say so if any of these attempts, each given by its searches, was right with fewer than hops."""
    few = sum(searches < hop for searches in solved)
    return f"{few} right with fewer searches than hops" if few else None


def verdict(record: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a challenger's question earned its difficulty, and why, by its line of the dump."""
    reward = record["reward"]
    if not reward.get("valid", True):
        return False, f"counts in no statistic: {reward.get('reason_invalid') or 'a service failed'}"
    if not reward["integrity"]:
        fault = str(reward.get("integrity_fault"))
        return False, FAULTS.get(fault, fault)
    if reward["k"] is None or reward["score"] is None:
        return False, f"not tried: {reward.get('refused') or 'no attempts'}"
    k, n = int(reward["k"]), int(reward["n"])
    tried = f"{k} of {n} attempts gave this answer"
    if not 0 < k < n:
        return False, f"{tried}: {difficulty(k, n)}"
    solved = (attempt["searches"] for attempt in record.get("attempts") or () if attempt["right"])
    few = shortcut(int(record["hop"] or 0), solved)
    return True, f"{tried}, reward {reward['score']:.2f}{f', {few}' if few else ''}"


def challenger_examples(folder: Path) -> Examples:
    """Examples from the dumps of a challenger's last steps."""
    accepted: list[tuple[str, Example]] = []
    rejected: list[tuple[str, Example]] = []
    for path in sorted((folder / "dumps").glob("step_*.jsonl"))[-_STEPS:][::-1]:
        for record in read_json_lines(path, DumpLine):
            with suppress(KeyError, ValueError):  # the page counts the lines that cannot be read
                msgspec.convert(record["reward"], CHALLENGED)
                is_good, why = verdict(record)
                kind = str(record["hop"]) if is_good else why.rpartition(": ")[2][:20]
                (accepted if is_good else rejected).append((kind, _of_dump(record, why)))
    return Examples(
        *([one for _, one in spread(some, lambda pair: pair[0])[:SHOWN]] for some in (accepted, rejected))
    )


def read_examples(folder: Path) -> Examples | None:
    """The examples in a finished stage's report or summary. None without any."""
    for name in (REPORT, SUMMARY):
        with suppress(ValueError, KeyError, AttributeError):  # another stage's file, or cut off by a kill
            return Examples.from_dict(read_object(folder / name)["examples"])
    return None


def _of_dump(record: Mapping[str, Any], why: str) -> Example:
    reward, document = record["reward"], str(record.get("document") or "")
    found = evidence(reward.get("answer"), document, Trajectory.from_dict(record["trajectory"]))
    names = str(record.get("doc_id")), record.get("question"), reward.get("answer")
    return Example(int(record["hop"] or 0), *names, why, found)
