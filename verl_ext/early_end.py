"""The note that a trainer leaves when it ends before its last step, because veRL exits with 0 either way."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drzero.ops.files import atomic_write

NOTE = "ended_early.json"


@dataclass(frozen=True)
class Note:
    """The last step, which is saved, and why the trainer ended there: out of time or `collapsed`."""

    step: int
    why: str
    collapsed: bool = False


def write_note(folder: Path, note: Note) -> None:
    """Write the note, atomically."""
    atomic_write(folder / NOTE, json.dumps(asdict(note)))


def read_note(folder: Path) -> Note | None:
    """The note in a run's folder, or None."""
    path = folder / NOTE
    return Note(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def drop_note(folder: Path) -> None:
    """Remove the note, if any."""
    (folder / NOTE).unlink(missing_ok=True)
