"""The note that a trainer leaves when it ends before its last step: veRL exits with 0 all the same.

Free of veRL, so that the stage that started the trainer may read it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drzero.ops.files import atomic_write

NOTE = "ended_early.json"
"""The note's file in a run's folder."""


@dataclass(frozen=True)
class Note:
    """The last step, which is saved, and why the trainer ended there: out of time, or `collapsed`."""

    step: int
    why: str
    collapsed: bool = False


def write_note(folder: Path, note: Note) -> None:
    """Write the note into a run's folder, atomically."""
    atomic_write(folder / NOTE, json.dumps(asdict(note)))


def read_note(folder: Path) -> Note | None:
    """The note in a run's folder; None when there is none."""
    path = folder / NOTE
    return Note(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def drop_note(folder: Path) -> None:
    """Remove the note, if there is one."""
    (folder / NOTE).unlink(missing_ok=True)
