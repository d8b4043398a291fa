"""What the dump of a step says about its rows."""

import json
from pathlib import Path

import pytest

from verl_ext.method.trajectory import Trajectory
from verl_ext.trainer.step_rows import StepRow, dump_rows


@pytest.mark.parametrize(
    ("given", "written", "shown"),
    [(None, "Who leads Orrin?", "Who leads Orrin?"), ("Who is it?", None, "Who is it?"), (None, None, None)],
    ids=["challenger", "solver", "challenger without a question"],
)
def test_a_dump_has_the_question_of_the_row_at_its_top(
    tmp_path: Path, given: str | None, written: str | None, shown: str | None
) -> None:
    reward = {"score": 0.0} | ({"question": written} if given is None else {})
    row = StepRow("p_0_0", False, "search_zero", {"question": given}, reward, Trajectory(), 0)
    dump_rows([row], 1, tmp_path / "step_0001.jsonl")
    assert json.loads((tmp_path / "step_0001.jsonl").read_text())["question"] == shown
