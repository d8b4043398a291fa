"""The trajectories of a page: a row each for its table, and their conversations packed for the browser.

A conversation is about 30 kB of HTML. Packs of 32 are compressed, and the browser unpacks one when you open a
row. Beyond ROW_LIMIT rows the table keeps every second, third … trajectory, and beyond PACK_LIMIT bytes every
second, fourth … pack.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from drzero.runs.report.conversation import render
from drzero.runs.report.trajectories import PARTS, Trajectory

ROW_LIMIT = 20_000
PACK_LIMIT = 48 << 20
PACK_SIZE = 32
_LONGEST_CELL = 300

_FIRST = (
    "stage",
    "role",
    "step",
    "prompt",
    "hop",
    "question",
    "answer",
    "score",
    "attempts_right",
    "verdict",
    "failures",
)
_COLUMNS = (*_FIRST, "turns", "searches", *PARTS)
_PLACE = ("source", "line", "place")
_UNLISTED = (*_PLACE, "tried")  # no columns


class TrajectoryTable:
    """Rows in the order added, with the columns that some row fills."""

    def __init__(self, expected: int, *, row_limit: int = ROW_LIMIT, pack_limit: int = PACK_LIMIT) -> None:
        self._pack_limit = pack_limit
        self._row_every = max(-(-expected // row_limit), 1)
        self._open_every = self._row_every
        self._rows: list[dict[str, Any]] = []
        self._pending: list[str] = []
        self.packs: list[str] = []
        """Base64 of a gzipped JSON list of at most PACK_SIZE conversations."""
        self.total = 0
        """All trajectories, including those left out."""

    def add(self, trajectory: Trajectory) -> None:
        """Add one if the limits allow."""
        number, self.total = self.total, self.total + 1
        if number % self._row_every:
            return
        row = _cells(trajectory)
        self._rows.append(row)
        if number % self._open_every == 0:
            row["place"] = len(self.packs) * PACK_SIZE + len(self._pending)
            self._pending.append(render(trajectory))
            if len(self._pending) == PACK_SIZE:
                self._pack()

    def finish(self) -> None:
        """Pack the rest. Nothing can be added afterwards."""
        if self._pending:
            self._pack()

    @property
    def opened(self) -> int:
        """How many rows have their conversation in the page."""
        return sum(row.get("place") is not None for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        """The cells of each row by name, with `tried`, a question's attempts, and `place` if it opens."""
        return self._rows

    @property
    def columns(self) -> list[str]:
        """The columns that some row fills."""
        # An environment has its own reward parts.
        known = (*_COLUMNS, *_UNLISTED)
        others = dict.fromkeys(name for row in self._rows for name in row if name not in known)
        return [
            name
            for name in (*_COLUMNS, *others)
            if any(row.get(name) not in (None, "") for row in self._rows)
        ]

    @property
    def rows(self) -> list[Sequence[Any]]:
        """The cells of each row, then its file, its line, and its place in the packs or None."""
        columns = [*self.columns, *_PLACE]
        return [[row.get(name) for name in columns] for row in self._rows]

    def _pack(self) -> None:
        data = gzip.compress(json.dumps(self._pending).encode(), compresslevel=6, mtime=0)
        self.packs.append(base64.b64encode(data).decode())
        self._pending = []
        while len(self.packs) > 1 and sum(map(len, self.packs)) > self._pack_limit:
            self._leave_out_every_second()

    def _leave_out_every_second(self) -> None:
        self.packs = self.packs[::2]
        self._open_every *= 2
        for row in self._rows:
            if (place := row.get("place")) is not None:
                pack, inside = divmod(place, PACK_SIZE)
                row["place"] = None if pack % 2 else pack // 2 * PACK_SIZE + inside


def _cells(trajectory: Trajectory) -> dict[str, Any]:
    reward = trajectory.reward
    k = reward.get("k")
    cells: dict[str, Any] = {
        "stage": trajectory.stage,
        "role": trajectory.role,
        "step": trajectory.step,
        "prompt": trajectory.prompt,
        "hop": trajectory.hop or None,
        "score": trajectory.score if trajectory.valid else None,
        # A part may have the name of a column.
        **{
            name: part
            for name, part in trajectory.parts.items()
            if name not in (*_FIRST, *_UNLISTED, "turns")
        },
        "attempts_right": None if k is None else int(k),
        "tried": reward.get("n"),
        "turns": len(trajectory.conversation.turns),
        "searches": len(trajectory.conversation.searches),
        "verdict": trajectory.verdict,
        "failures": ", ".join(trajectory.failures),
        "question": trajectory.question,
        "answer": trajectory.answer,
        "source": trajectory.source,
        "line": trajectory.line,
    }
    return {name: _cell(value) for name, value in cells.items()}


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, str):
        return value[:_LONGEST_CELL] + "…" if len(value) > _LONGEST_CELL else value
    return value
