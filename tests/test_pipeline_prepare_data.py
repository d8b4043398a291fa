"""The prepare-data stage as its launcher sees it: what it announces, and when it is not begun."""

import json
import time
from pathlib import Path

import pytest
from conftest import Prepared

from pipeline.cli import main
from verl_ext.artefacts import LOG_VARIABLE
from verl_ext.stop_time import STOP_VARIABLE


def arguments(prepared: Prepared, corpus: Path) -> list[str]:
    """The command from a corpus file into an empty folder."""
    source = f"source={prepared.corpus / 'corpus.jsonl'}"
    return [*prepared.overrides(corpus), f"paths.corpus={corpus}", source, "rows=8", "heldout_rows=2"]


def test_the_index_is_announced_then_the_prompts_and_all_are_there(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "announced.jsonl"))
    corpus = tmp_path / "corpus"
    assert main(["prepare-data", *arguments(prepared, corpus)]) == 0
    paths = [
        Path(json.loads(line)["path"]) for line in (tmp_path / "announced.jsonl").read_text().splitlines()
    ]
    prompts = [corpus / "data" / f"zero_ratio4321{part}.parquet" for part in ("", "_heldout")]
    assert paths == [corpus / "chromadb", *prompts] and all(path.exists() for path in paths)


def test_with_too_little_time_it_is_not_begun(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 100))
    assert main(["prepare-data", *arguments(prepared, tmp_path / "corpus")]) == 75
    assert "drzero prepare-data: prepare-data was not started: the stop time" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()
