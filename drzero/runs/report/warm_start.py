"""A warm start's parts of the page: the check before and after, its demonstrations, what it left out."""

from collections import Counter
from collections.abc import Mapping

from data.examples import SHOWN
from drzero.ops.grouping import by_key
from drzero.ops.records import JsonTail, Step, read_json_lines, shape
from drzero.ops.text import counted
from drzero.runs.report.loop import GateOutcome
from drzero.runs.run_folder import RunFolder
from drzero.stages.result import DEMONSTRATIONS, LEFT_OUT
from drzero.stages.warm_start_report import CHECKS, MEASURED, shares

Shares = Mapping[str, float]  # a share with its n and its interval, empty if nothing was played
_CheckLine = shape({"role": str, "hop": Step})
_Demonstration = shape({"split": str, "role": str, "hop": Step})
_LeftOut = shape({"reason": str}, question=str | None, answer=str | None)


def measured(run: RunFolder) -> list[tuple[str, Shares, Shares]]:
    """Each share of the check before and after, from its journals: a killed run has no report."""
    before, after = (shares(read_json_lines(run.folder / name, _CheckLine)) for name in CHECKS)
    return [
        (words, before.get(name, {}), after.get(name, {}))
        for name, (_, words) in MEASURED.items()
        if name in before or name in after
    ]


def demonstrations(run: RunFolder) -> dict[tuple[str, str], Counter[int]]:
    """How many there are of each split and role, by hop count."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for one in JsonTail(run.folder / DEMONSTRATIONS, _Demonstration).stream(to_end=True):
        counts.setdefault((one["split"], one["role"]), Counter())[one["hop"]] += 1
    return counts


def left_out(run: RunFolder) -> list[GateOutcome]:
    """Each kind of reason, the most frequent first, with examples."""
    some_left_out = read_json_lines(run.folder / LEFT_OUT, _LeftOut)
    by = by_key(some_left_out, lambda one: str(one["reason"]).partition(":")[0])
    kinds = sorted(by.items(), key=lambda kind: -len(kind[1]))
    return [
        GateOutcome(
            run.name,
            reason,
            judged=0,
            refused=len(some),
            note=counted(len(some), "conversation"),
            examples=[
                (one.get("question") or "–", one.get("answer") or "–", one["reason"]) for one in some[:SHOWN]
            ],
        )
        for reason, some in kinds
    ]
