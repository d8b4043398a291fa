"""The dump of a step, and its page."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from environments.conversation import Conversation, user_message
from environments.conversation import Turn as EpisodeTurn
from verl_ext.method.challenger_reward import ChallengerScore
from verl_ext.method.solver_reward import SolverScore
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.trainer.step_rows import SCHEMA, StepRow, dump_rows

PAGE = (Path(__file__).parents[2] / "docs" / "dumps.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "written", "shown"),
    [(None, "Who leads Orrin?", "Who leads Orrin?"), ("Who is it?", None, "Who is it?"), (None, None, None)],
    ids=["challenger", "solver", "challenger without a question"],
)
def test_a_dump_has_the_rows_question(tmp_path, given, written, shown):
    reward = {"score": 0.0} | ({"question": written} if given is None else {})
    row = StepRow("p_0_0", False, "search_zero", {"question": given}, reward, Trajectory(), 0)
    dump_rows([row], 1, tmp_path / "step_0001.jsonl")
    assert json.loads((tmp_path / "step_0001.jsonl").read_text())["question"] == shown


def test_a_text_with_half_of_a_surrogate_pair_costs_no_step(tmp_path):
    told = Conversation((user_message("\ud83d?"),), (EpisodeTurn("5", answers=(user_message("no \ude00"),)),))
    row = StepRow("p_0_0", False, "own", {"row": "\udfff"}, {"score": 0.0}, told, 0)
    dump_rows([row], 1, tmp_path / "step_0001.jsonl")
    record = json.loads((tmp_path / "step_0001.jsonl").read_bytes())
    assert record["question"] == "?" and record["trajectory"]["opening"][0]["content"] == "??"
    assert record["trajectory"]["turns"][0]["observation"] == "no ?"


def test_the_page_lists_every_field_of_a_line(tmp_path):
    agent = {"calls": [], "places": {}, "faults": []}
    row = StepRow("p_0_0", False, "own", {}, {"score": 0.0}, Trajectory(), 0, agent=agent)
    dump_rows([row], 1, tmp_path / "dump.jsonl")
    record = json.loads((tmp_path / "dump.jsonl").read_text())
    table = PAGE.partition(f"## Dumps, schema {SCHEMA}\n")[2].partition("A **trajectory**")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(record)


def test_the_page_names_every_part_of_a_reward_and_a_conversation():
    section = PAGE.partition("A **trajectory**")[2].partition("## Samples")[0]
    named = set(re.findall(r"`(\w+)`", section))
    kinds = (ChallengerScore, SolverScore, Turn, SearchCall)
    assert {field.name for kind in kinds for field in fields(kind)} <= named
