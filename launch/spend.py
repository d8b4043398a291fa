"""What a run has cost so far, and when its money is out.

`launches/NAME/spend.json` has one entry a call: when it began, how far it is known to have run, at what
price. A call that is killed without a word is counted up to its last entry, never older than `EVERY_S`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.atomic import atomic_write

EVERY_S = 60.0
"""Seconds between two entries of a running call."""


@dataclass
class Call:
    """One call's share."""

    launch: str
    part: int
    began: float
    until: float
    usd_per_hour: float

    @property
    def usd(self) -> float:
        """US dollars."""
        return (self.until - self.began) / 3600 * self.usd_per_hour


class Spend:
    """The calls of one run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spend.json"
        self.calls: list[Call] = []
        if self._path.is_file():
            self.calls = [Call(**values) for values in json.loads(self._path.read_text(encoding="utf-8"))]

    def begin(self, launch: str, part: int, now: float, usd_per_hour: float) -> Call:
        """Enter a new call."""
        call = Call(launch, part, now, now, usd_per_hour)
        self.calls.append(call)
        self.write()
        return call

    def write(self) -> None:
        """Put all calls on disk."""
        atomic_write(self._path, json.dumps([asdict(call) for call in self.calls], indent=1))

    @property
    def usd(self) -> float:
        """US dollars of all calls."""
        return sum(call.usd for call in self.calls)


def money_ends_at(now: float, spent_usd: float, usd_per_hour: float, max_usd: float | None) -> float:
    """Unix time at which `max_usd` is spent, infinity without a limit or a price."""
    if max_usd is None or not usd_per_hour:
        return float("inf")
    return now + max(0.0, max_usd - spent_usd) / usd_per_hour * 3600
