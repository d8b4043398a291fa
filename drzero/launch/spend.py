"""The cost of a run so far, and the time when its money runs out.

`launches/NAME/spend.json` has an entry for each call. A running call updates its entry every `EVERY_S`, so at
most that much of a killed call is missing.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drzero.ops.files import atomic_write

EVERY_S = 60.0  # seconds between updates of a running call's entry
SILENT_S = 5 * EVERY_S
CONTINUES = "continue"  # the outcome of a call that another call of the same launch continues


@dataclass
class PaidCall:
    """One call's cost. Times are Unix seconds."""

    launch: str
    part: int
    began: float
    until: float
    usd_per_hour: float
    failed_commits: int = 0

    @property
    def usd(self) -> float:
        """US dollars."""
        return (self.until - self.began) / 3600 * self.usd_per_hour


class Spend:
    """The calls of one run over all its launches."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spend.json"
        self.calls: list[PaidCall] = []
        if self._path.is_file():
            self.calls = [PaidCall(**values) for values in json.loads(self._path.read_text(encoding="utf-8"))]

    def begin(self, launch: str, part: int, now: float, usd_per_hour: float) -> PaidCall:
        """Add a call and write the file."""
        call = PaidCall(launch, part, now, now, usd_per_hour)
        self.calls.append(call)
        self.write()
        return call

    def write(self) -> None:
        """Write the file."""
        atomic_write(self._path, json.dumps([asdict(call) for call in self.calls], indent=1))

    @property
    def usd(self) -> float:
        """US dollars, all calls together."""
        return sum(call.usd for call in self.calls)


def money_ends_at(now: float, spent_usd: float, usd_per_hour: float, max_usd: float | None) -> float:
    """Unix time when `max_usd` is spent. Infinite without a limit or a price."""
    if max_usd is None or not usd_per_hour:
        return float("inf")
    return now + max(0.0, max_usd - spent_usd) / usd_per_hour * 3600
