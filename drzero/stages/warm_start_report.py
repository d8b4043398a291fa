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
