"""When a run must end: the decision, the variable, and the note that a trainer leaves."""

import math
import time

import pytest

from drzero.cli import main
from drzero.ops.errors import OutOfTime, UserError
from drzero.ops.stop_time import (
    CLOSING_S,
    FIRST_SAVE_S,
    NOTE,
    STEP_FACTOR,
    STOP_VARIABLE,
    Note,
    Pace,
    drop_note,
    read_note,
    require_time,
    seconds_left,
    stop_time,
    write_note,
)


@pytest.mark.parametrize("text", [None, "", " "])
def test_an_unset_variable_is_no_stop_time(monkeypatch, text):
    monkeypatch.delenv(STOP_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(STOP_VARIABLE, text)
    assert stop_time() == seconds_left() == math.inf


@pytest.mark.parametrize("text", ["tomorrow", "nan", "inf", "2026-01-01", "1e999"])
def test_a_bad_stop_time_is_refused_before_anything_starts(monkeypatch, capsys, text):
    monkeypatch.setenv(STOP_VARIABLE, text)
    with pytest.raises(UserError):
        stop_time()
    assert main(["challenger"]) == 2
    assert f"{STOP_VARIABLE}='{text}' is not a time: give Unix seconds" in capsys.readouterr().err


STAGES = ["prepare-data", "challenger", "synthesize", "solver", "merge", "evaluate", "evolve"]
STAGES += ["demo", "demo-data", "smoke"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_past_stop_time_ends_a_stage_at_once_with_75(monkeypatch, capsys, tmp_path, stage):
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() - 5))
    places = [f"paths.{kind}={tmp_path / kind}" for kind in ("corpus", "checkpoints")]
    assert main([stage, *places]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"drzero {stage}: {stage} was not started: the stop time ({STOP_VARIABLE}) was")
    assert "rerun with more time to resume" in line
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_only_reads_is_not_stopped(monkeypatch, tmp_path):
    monkeypatch.setenv(STOP_VARIABLE, "1")
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_a_stage_without_enough_time_reports_its_need(monkeypatch):
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 100))
    require_time("the export", 60)
    with pytest.raises(OutOfTime, match="the export takes 200 s at least; rerun with more time to resume"):
        require_time("the export", 200)


def paced(*parts):
    """A start that has spent these seconds on these parts, in this order."""
    now = [1000.0]
    pace = Pace(lambda: now[0])
    for part, seconds in parts:
        if part in ("save", "validation"):
            with pace.apart(part):
                now[0] += seconds
            continue
        now[0] += seconds
        if part == "step":
            pace.end_step()
        else:
            pace.begin_step()
    return pace


STEP, SAVE, VALIDATION = ("step", 20.0), ("save", 1.0), ("validation", 300.0)


@pytest.mark.parametrize(
    ("parts", "validates", "needed"),
    [
        ([("step", 40), ("save", 9), ("step", 50), ("save", 5), ("step", 30)], False, STEP_FACTOR * 50 + 9),
        ([("validation", 7000), ("save", 10), STEP], False, STEP_FACTOR * 20 + 10),
        ([("before", 5000), ("step", 10)], False, STEP_FACTOR * 10 + FIRST_SAVE_S),
        ([VALIDATION, STEP, SAVE], True, STEP_FACTOR * 20 + 1 + 300),
        ([STEP, SAVE], True, STEP_FACTOR * 20 + 1 + 20),
    ],
    ids=["longest step and save", "parts are apart", "untimed save", "a validation", "untimed validation"],
)
def test_the_next_step_must_fit(parts, validates, needed):
    pace = paced(*parts)
    assert pace.reason_to_stop(needed + CLOSING_S, validates=validates) is None
    assert pace.reason_to_stop(needed + CLOSING_S - 1, validates=validates)
    assert pace.reason_to_stop(math.inf, validates=validates) is None


def test_the_reason_to_stop_names_the_times():
    reason = paced(("step", 50), ("save", 9)).reason_to_stop(98, validates=False)
    assert reason == (
        "another step may take 60 s and its save 9 s, and the stop time (DRZERO_STOP_AT) is 98 s ahead"
    )


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_note_is_there_until_it_is_dropped(tmp_path, collapsed):
    note = Note(3, "the stop time was near", collapsed)
    write_note(tmp_path, note)
    assert [path.name for path in tmp_path.iterdir()] == [NOTE]
    assert read_note(tmp_path) == read_note(tmp_path) == note
    for _ in range(2):
        drop_note(tmp_path)
        assert read_note(tmp_path) is None and list(tmp_path.iterdir()) == []
