"""What a run has cost so far, and when its money runs out.

    spend = Spend(launch_folder("challenger_iter1"))
    spend.usd, money_ends_at(time.time(), spend.usd, 36.0, max_usd=100)

`launches/NAME/spend.json` has one entry for each call: when it began, until when it is known to have run, and
its price. The entry is updated every `EVERY_S`, so a call that is killed is counted up to at most that long
before its end.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drzero.ops.files import atomic_write

EVERY_S = 60.0
"""Seconds between two updates of a running call's entry."""
SILENT_S = 5 * EVERY_S
"""Age in seconds from which a running call's entry shows that nothing was committed lately."""
CONTINUES = "continue"
"""State of a call's outcome after which another call of the same launch follows."""


@dataclass
class Call:
    """One call's share; times are Unix seconds."""

    launch: str
    part: int
    began: float
    until: float
    usd_per_hour: float
    failed_commits: int = 0
    """How often a volume was not committed."""

    @property
    def usd(self) -> float:
        """US dollars."""
        return (self.until - self.began) / 3600 * self.usd_per_hour


class Spend:
    """The calls of one run, of all its launches."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spend.json"
        self.calls: list[Call] = []
        if self._path.is_file():
            self.calls = [Call(**values) for values in json.loads(self._path.read_text(encoding="utf-8"))]

    def begin(self, launch: str, part: int, now: float, usd_per_hour: float) -> Call:
        """Add a new call and write the file."""
        call = Call(launch, part, now, now, usd_per_hour)
        self.calls.append(call)
        self.write()
        return call

    def write(self) -> None:
        """Write all calls to disk."""
        atomic_write(self._path, json.dumps([asdict(call) for call in self.calls], indent=1))

    @property
    def usd(self) -> float:
        """US dollars of all calls."""
        return sum(call.usd for call in self.calls)


def silent_s(calls: Sequence[Call], now: float) -> float:
    """Seconds since the last update by any of the calls; infinite without calls."""
    return now - max((call.until for call in calls), default=float("-inf"))


def money_ends_at(now: float, spent_usd: float, usd_per_hour: float, max_usd: float | None) -> float:
    """Unix time at which `max_usd` is spent; infinite without a limit or a price."""
    if max_usd is None or not usd_per_hour:
        return float("inf")
    return now + max(0.0, max_usd - spent_usd) / usd_per_hour * 3600
