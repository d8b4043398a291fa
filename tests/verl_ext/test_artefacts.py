"""What is announced, to whom, and that lines of several processes do not mix."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from verl_ext.artefacts import LOG_VARIABLE, announce


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the variable names."""
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "artefacts.jsonl"))
    return tmp_path / "artefacts.jsonl"


def announced(log: Path) -> list[str]:
    return [json.loads(line)["path"] for line in log.read_text().splitlines()]


def test_an_announcement_is_a_line_with_the_absolute_path_and_the_time(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    before = time.time()
    announce(Path("run/global_step_1"))
    (line,) = log.read_text().splitlines()
    record = json.loads(line)
    assert set(record) == {"path", "time"}
    assert record["path"] == str(log.parent / "run" / "global_step_1")
    assert before <= record["time"] <= time.time()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if value is None:
        monkeypatch.delenv(LOG_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(LOG_VARIABLE, value)
    announce(tmp_path / "manifest.json")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "nowhere" / "artefacts.jsonl"))
    with pytest.raises(OSError, match="nowhere"):
        announce(tmp_path / "manifest.json")


def _announce_many(number: int) -> None:
    for place in range(200):
        announce(Path(f"/{number}/{place}"))


def test_processes_that_announce_at_once_keep_their_lines_whole(log: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_announce_many, range(4))
    assert sorted(announced(log)) == sorted(
        f"/{number}/{place}" for number in range(4) for place in range(200)
    )
