"""The stop time: when a stage must have ended, and whether something can still be started before it.

    DRZERO_STOP_AT=1767225600 drzero challenger …       # Unix seconds

A stage ends at a whole checkpoint with exit code 75, and a rerun resumes it (docs/stopping.md).
The trainer then leaves a note, because veRL exits with 0 either way.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from drzero.ops.errors import OutOfTime, UserError
from drzero.ops.files import atomic_write

STOP_VARIABLE = "DRZERO_STOP_AT"
STEP_FACTOR = 1.2  # multiplies the longest step so far, as room for a longer one
FIRST_SAVE_S = 120.0  # assumed duration of a save until one has been timed
CLOSING_S = 30.0  # kept after the last save so that Ray and the services can shut down


def stop_time() -> float:
    """Unix time at which the stage must have ended. Infinite if none is set. Raises UserError."""
    text = os.environ.get(STOP_VARIABLE, "").strip()
    if not text:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UserError(
            f"{STOP_VARIABLE}={text!r} is not a time: give Unix seconds, such as $(date -d '+2 hours' +%s), "
            "or unset it"
        )
    return seconds


def seconds_left() -> float:
    """Seconds until the stop time. Negative after it, infinite without one. Raises UserError."""
    return stop_time() - time.time()


def describe_left(left_s: float) -> str:
    """The distance to the stop time, as the end of a sentence."""
    where = f"is {left_s:.0f} s ahead" if left_s > 0 else f"was {-left_s:.0f} s ago"
    return f"the stop time ({STOP_VARIABLE}) {where}"


class Pace:
    """The longest step, save and validation of this start, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest: dict[str, float] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step now. The time since the last step is not counted."""
        self._began, self._apart = self._clock(), 0.0

    def end_step(self) -> None:
        """End the step and begin the next one."""
        self._took("step", self._clock() - self._began - self._apart)
        self.begin_step()

    @contextmanager
    def apart(self, part: str) -> Iterator[None]:
        """Time the body as a `save` or a `validation`, apart from the step around it."""
        began = self._clock()
        yield
        took = self._clock() - began
        self._took(part, took)
        self._apart += took

    @property
    def step_s(self) -> float:
        """The longest step, with room for a longer one."""
        return STEP_FACTOR * self._longest.get("step", 0.0)

    def reason_to_stop(self, left_s: float, validates: bool) -> str | None:
        """Why the run must end after this step, or None. `validates`: whether a validation is due now."""
        step, save = self._longest.get("step", 0.0), self._longest.get("save", FIRST_SAVE_S)
        # An untimed validation is assumed to take as long as a step.
        validation = self._longest.get("validation", step) if validates else 0.0
        if validation + self.step_s + save + CLOSING_S <= left_s:
            return None
        return (
            f"another step may take {self.step_s:.0f} s and its save {save:.0f} s, and "
            f"{describe_left(left_s)}"
        )

    def _took(self, part: str, seconds: float) -> None:
        self._longest[part] = max(self._longest.get(part, 0.0), seconds)


def require_time(what: str, least_s: float = 0.0) -> None:
    """Raise OutOfTime if at most `least_s` seconds are left for `what`."""
    left = seconds_left()
    if left > max(least_s, 0.0):
        return
    need = f", and {what} takes {least_s:.0f} s at least" if left > 0 else ""
    raise OutOfTime(f"{what} was not started: {describe_left(left)}{need}; rerun with more time to resume")


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
