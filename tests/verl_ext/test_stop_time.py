"""When a run must end: the decision as a formula, the variable, and the note that a trainer leaves."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.cli import main
from drzero.ops.errors import OutOfTime
from verl_ext.early_end import NOTE, Note, drop_note, read_note, write_note
from verl_ext.stop_time import (
    CLOSING_S,
    FIRST_SAVE_S,
    STEP_FACTOR,
    STOP_VARIABLE,
    BadStopTime,
    Pace,
    is_time_to_stop,
    require_time,
    seconds_left,
    stop_time,
)

SECONDS = st.floats(0, 1e6)
LEFT = st.floats(-1e6, 1e7)


@given(LEFT, SECONDS, SECONDS, SECONDS)
def test_a_run_that_continues_has_room_for_its_longest_step_and_save(
    left: float, step: float, save: float, validation: float
) -> None:
    if not is_time_to_stop(left, step, save, validation):
        assert validation + step + save < left


@given(LEFT, SECONDS, SECONDS, SECONDS)
def test_a_run_with_room_for_a_step_a_fifth_longer_a_save_and_its_shutdown_continues(
    left: float, step: float, save: float, validation: float
) -> None:
    if left > (validation + STEP_FACTOR * step + save + CLOSING_S) * (1 + 1e-9):
        assert not is_time_to_stop(left, step, save, validation)


@given(LEFT, SECONDS, SECONDS, SECONDS, SECONDS)
def test_less_time_or_longer_work_never_lets_a_run_continue_that_would_have_stopped(
    left: float, step: float, save: float, validation: float, more: float
) -> None:
    if is_time_to_stop(left, step, save, validation):
        assert is_time_to_stop(left - more, step, save, validation)
        assert is_time_to_stop(left, step + more, save, validation)
        assert is_time_to_stop(left, step, save + more, validation)
        assert is_time_to_stop(left, step, save, validation + more)


@given(SECONDS, SECONDS)
def test_without_a_stop_time_a_run_never_stops(step: float, save: float) -> None:
    assert not is_time_to_stop(math.inf, step, save)


@pytest.mark.parametrize("text", [None, "", " "])
def test_an_unset_variable_is_no_stop_time(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv(STOP_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(STOP_VARIABLE, text)
    assert stop_time() == seconds_left() == math.inf


@pytest.mark.parametrize("text", ["tomorrow", "nan", "inf", "2026-01-01", "1e999"])
def test_a_variable_that_holds_no_time_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, text)
    with pytest.raises(BadStopTime):
        stop_time()
    assert main(["challenger"]) == 2
    assert f"{STOP_VARIABLE}='{text}' is not a time: give Unix seconds" in capsys.readouterr().err


STAGES = (
    *("prepare-data", "challenger", "synthesize", "solver", "merge", "evaluate", "evolve"),
    *("demo", "demo-data", "smoke"),
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stop_time_that_is_past_ends_a_stage_at_once_with_75_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: str
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() - 5))
    places = [f"paths.{kind}={tmp_path / kind}" for kind in ("corpus", "checkpoints")]
    assert main([stage, *places]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"drzero {stage}: {stage} was not started: the stop time ({STOP_VARIABLE}) was")
    assert "rerun with more time to resume" in line
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_only_reads_is_not_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "1")
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_a_stage_that_needs_more_time_than_is_left_reports_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 100))
    require_time("the export", 60)
    with pytest.raises(OutOfTime, match="the export takes 200 s at least; rerun with more time to resume"):
        require_time("the export", 200)


class Clock:
    """One that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def paced(*parts: tuple[str, float]) -> Pace:
    """A start that has spent these seconds on these parts, in this order."""
    clock = Clock()
    pace = Pace(clock)
    for part, seconds in parts:
        if part == "step":
            clock.now += seconds
            pace.end_step()
        else:
            with pace.apart(part):
                clock.now += seconds
    return pace


def test_the_longest_step_and_save_are_what_has_to_fit() -> None:
    pace = paced(("step", 40), ("save", 9), ("step", 50), ("save", 5), ("step", 30))
    needed = STEP_FACTOR * 50 + 9 + CLOSING_S
    assert pace.reason_to_stop(needed, validates=False) is None
    reason = pace.reason_to_stop(needed - 1, validates=False)
    assert reason == (
        "another step may take 60 s and its save 9 s, and the stop time (DRZERO_STOP_AT) is 98 s ahead"
    )


def test_saves_and_validations_are_not_part_of_the_step_around_them() -> None:
    pace = paced(("validation", 7000), ("save", 10), ("step", 20))
    assert pace.reason_to_stop(STEP_FACTOR * 20 + 10 + CLOSING_S, validates=False) is None


def test_time_before_the_first_step_is_not_part_of_it() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now += 5000
    pace.begin_step()
    clock.now += 10
    pace.end_step()
    assert pace.reason_to_stop(STEP_FACTOR * 10 + FIRST_SAVE_S + CLOSING_S, validates=False) is None


def test_before_a_save_has_been_timed_the_default_time_is_kept_for_one() -> None:
    pace, needed = paced(("step", 10)), STEP_FACTOR * 10 + FIRST_SAVE_S + CLOSING_S
    assert pace.reason_to_stop(needed, validates=False) is None
    assert pace.reason_to_stop(needed - 1, validates=False)


def test_a_validation_that_is_due_has_to_fit_too() -> None:
    pace = paced(("validation", 300), ("step", 20), ("save", 1))
    left = STEP_FACTOR * 20 + 1 + CLOSING_S + 300
    assert pace.reason_to_stop(left, validates=True) is None
    assert pace.reason_to_stop(left - 1, validates=True)


def test_a_validation_that_was_never_timed_is_assumed_to_take_as_long_as_a_step() -> None:
    pace = paced(("step", 20), ("save", 1))
    left = STEP_FACTOR * 20 + 1 + CLOSING_S + 20
    assert pace.reason_to_stop(left, validates=True) is None
    assert pace.reason_to_stop(left - 1, validates=True)


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_note_is_there_until_it_is_dropped(tmp_path: Path, collapsed: bool) -> None:
    note = Note(3, "the stop time was near", collapsed)
    write_note(tmp_path, note)
    assert [path.name for path in tmp_path.iterdir()] == [NOTE]
    assert read_note(tmp_path) == read_note(tmp_path) == note
    for _ in range(2):
        drop_note(tmp_path)
        assert read_note(tmp_path) is None and list(tmp_path.iterdir()) == []
