"""When a run has to have ended by itself, and whether another step of training still fits before.

    DRZERO_STOP_AT=1767225600 drzero challenger …       # Unix seconds

Whoever pays for the machine sets the time: a provider's limit, or the end of a budget. A stage then ends at a
whole checkpoint before it, with exit code 75, and a rerun goes on as if nothing had been (docs/stopping.md).
How long a step will take is not known, so the longest so far, and a fifth more, has to fit; so has a save.
The trainer leaves a note of why it ended in the run's folder, because veRL's exit code is 0 then. Free of
veRL, so that any part may use it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

STOP_VARIABLE = "DRZERO_STOP_AT"
STEP_FACTOR = 1.2
"""Times the longest step so far: room for a longer one, with its weight sync and its metrics."""
FIRST_SAVE_S = 120.0
"""What a save may take before the first has been timed; of any later one at least what the longest took."""
CLOSING_S = 30.0
"""Between the end of the last save and the end of the stage: Ray and the services shut down."""
NOTE = "out_of_time.json"
"""In a run's folder, from the trainer's end until the stage has read it."""


class BadStopTime(ValueError):
    """The variable holds no time."""


def stop_time() -> float:
    """Unix time at which the stage must have ended, infinite when nobody has set one.

    Raises BadStopTime when the variable holds anything but a finite number.
    """
    text = os.environ.get(STOP_VARIABLE, "").strip()
    if not text:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise BadStopTime(
            f"{STOP_VARIABLE}={text!r} is no time: give Unix seconds, such as $(date -d '+2 hours' +%s), or "
            "unset it"
        )
    return seconds


def seconds_left() -> float:
    """Seconds until the stop time, negative after it, infinite without one. Raises BadStopTime."""
    return stop_time() - time.time()


def told_left(left_s: float) -> str:
    """Where the stop time is, as the end of a sentence."""
    where = f"is {left_s:.0f} s ahead" if left_s > 0 else f"was {-left_s:.0f} s ago"
    return f"the stop time ({STOP_VARIABLE}) {where}"


def is_time_to_stop(left_s: float, step_s: float, save_s: float | None, validation_s: float = 0.0) -> bool:
    """Whether a run with `left_s` seconds left must end now, rather than after another step.

    `step_s` and `save_s` are the longest so far, `save_s` None before the first save; `validation_s` is what
    a validation that is due before that step may take.
    """
    save_s = FIRST_SAVE_S if save_s is None else save_s
    return validation_s + STEP_FACTOR * step_s + save_s + CLOSING_S > left_s


class Pace:
    """How long the steps, saves and validations of this start took at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """A step begins now; `clock` gives seconds."""
        self._clock = clock
        self._longest: dict[str, float] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """What has passed since the last step is no part of the next."""
        self._began, self._apart = self._clock(), 0.0

    def end_step(self) -> None:
        """Take the time since the last step's end, or since `begin_step`, for a step; the next one begins."""
        self._took("step", self._clock() - self._began - self._apart)
        self.begin_step()

    @contextmanager
    def apart(self, part: str) -> Iterator[None]:
        """Time a `save` or a `validation`, which is no part of the step it falls into."""
        began = self._clock()
        yield
        took = self._clock() - began
        self._took(part, took)
        self._apart += took

    def reason_to_stop(self, left_s: float, validates: bool) -> str | None:
        """Why a run with `left_s` seconds left must end after this step; None when another one fits.

        `validates` says that a validation is due now.
        """
        step, save = self._longest.get("step", 0.0), self._longest.get("save")
        # One that has not been timed is taken for as long as a step.
        validation = self._longest.get("validation", step) if validates else 0.0
        if not is_time_to_stop(left_s, step, save, validation):
            return None
        save = FIRST_SAVE_S if save is None else save
        told = f"another step may take {STEP_FACTOR * step:.0f} s and its save {save:.0f} s"
        return f"{told}, and {told_left(left_s)}"

    def _took(self, part: str, seconds: float) -> None:
        self._longest[part] = max(self._longest.get(part, 0.0), seconds)


@dataclass(frozen=True)
class Note:
    """What a trainer that ran out of time leaves: its last saved step, and why it went no further."""

    step: int
    why: str


def write_note(folder: Path, note: Note) -> None:
    """Leave the note in a run's folder, whole or not at all."""
    partial = folder / f"{NOTE}.partial"
    partial.write_text(json.dumps(asdict(note)), encoding="utf-8")
    partial.rename(folder / NOTE)


def take_note(folder: Path) -> Note | None:
    """Read the note and remove it; None when there is none."""
    path = folder / NOTE
    if not path.is_file():
        return None
    note = Note(**json.loads(path.read_text(encoding="utf-8")))
    path.unlink()
    return note
