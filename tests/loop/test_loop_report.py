"""The loop's table, where there is little to show."""

from pathlib import Path

import pytest

from drzero.loop.manifest import Manifest
from drzero.loop.report import print_loop


def test_a_stage_whose_results_are_being_removed_is_shown_as_to_redo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest(tmp_path / "manifest.json")
    manifest.entry("solver_iter1").state = "forgotten"
    print_loop(manifest, ["solver_iter1"], running=False)
    assert "to redo" in capsys.readouterr().out
