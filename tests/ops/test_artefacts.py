"""Announcements of complete files, also from several processes at once."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from drzero.ops.artefacts import LOG_VARIABLE, announce


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "artefacts.jsonl"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "artefacts.jsonl"


def test_an_announcement_is_a_line_with_absolute_path_and_time(log):
    before = time.time()
    announce(Path("run/global_step_1"))
    record = json.loads(log.read_text())
    assert record == {"path": str(log.parent / "run" / "global_step_1"), "time": record["time"]}
    assert before <= record["time"] <= time.time()


def test_without_the_variable_nothing_is_written(log, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, "")
    announce(log.parent / "manifest.json")
    monkeypatch.delenv(LOG_VARIABLE)
    announce(log.parent / "manifest.json")
    assert list(log.parent.iterdir()) == []


def test_a_log_that_cannot_be_written_is_an_error(log, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, str(log.parent / "nowhere" / "artefacts.jsonl"))
    with pytest.raises(OSError, match="nowhere"):
        announce(log.parent / "manifest.json")


def _announce_many(number):
    for place in range(200):
        announce(Path(f"/{number}/{place}"))


def test_processes_that_announce_at_once_keep_lines_whole(log):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_announce_many, range(4))
    announced = [json.loads(line)["path"] for line in log.read_text().splitlines()]
    assert sorted(announced) == sorted(f"/{number}/{place}" for number in range(4) for place in range(200))
