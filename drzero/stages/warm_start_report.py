"""What a warm start's check measured, for its card and its page, which must not load a trainer for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from drzero.stages.evaluate.intervals import wilson

CHECKS = ("before.jsonl", "after.jsonl")  # the journals of the check
MEASURED = {
    "valid": ("challenger", "questions that keep the format"),
    "searched": ("challenger", "questions of several hops that searched"),
    "right": ("solver", "right answers"),
    "answered": ("solver", "answers given"),
}
"""What the check counts: of whose conversations, and in words."""


def shares(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Valid, searched (of several hops), answered and right, each with n and Wilson's 95 % interval."""
    found = {}
    for name, (role, _) in MEASURED.items():
        of_role = [one for one in records if one["role"] == role and (name != "searched" or one["hop"] > 1)]
        if of_role:
            k, n = sum(bool(one.get(name)) for one in of_role), len(of_role)
            low, high = wilson(k, n)
            found[name] = {"n": n, "share": k / n, "low": low, "high": high}
    return found


def measured_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What was measured in words, how often, its share before and after, and the interval of the last."""
    return [
        (
            MEASURED[name][1],
            str(after["n"]),
            f"{report['before'][name]['share']:.2f}" if name in report["before"] else "–",
            f"{after['share']:.2f}",
            f"{after['low']:.2f} to {after['high']:.2f}",
        )
        for name, after in report["after"].items()
    ]
