"""Agents and tasks of one's own as they are found: what is wrong is told before anything runs."""

import datetime
import json
import math
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drzero.recipe.environment import rows_of
from environments.agent.contract import RewardRule
from environments.agent.load import load_agent
from environments.agent.taskset import AgentTaskset
from environments.fault import EnvironmentUnusable, one_line
from environments.registry import find

CODE = """
import functools
async def answer(task, endpoint, retries=1): ...
part = functools.partial(answer, retries=2)
class Needs:
    def __init__(self, url): ...
    async def run(self, data, **more): ...
class Plain:
    def run(self, data, **more): ...
class Bare:
    async def run(self, data): ...
class Empty: ...
"""
BROKEN = {
    "no_colon.py": "async def answer(task, endpoint)\n",
    "exits.py": "import argparse\nargparse.ArgumentParser().parse_args(['x'])\n",
    "imports.py": "import nothing_there\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in {"good.py": CODE, **BROKEN}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("no_colon.py:answer", {}, "SyntaxError: expected ':' (no_colon.py, line 1)"),
        ("exits.py:answer", {}, "cannot be imported: SystemExit: 2"),
        ("imports.py:answer", {}, "No module named 'nothing_there'"),
        ("good.py:Needs", {}, "missing a required argument: 'url'): its constructor gets"),
        ("good.py:answr", {}, "has no function or class 'answr'; it has answer, part, Bare, Needs, Plain"),
        ("no_such_module:answer", {}, "there is no module 'no_such_module'"),
        ("no/such/file.py:answer", {}, "there is no file no/such/file.py"),
        ("good.py:Empty", {}, "has no method run: an agent has `async def run(self, data"),
        ("good.py:Plain", {}, "good.py:Plain.run is not async"),
        ("good.py:Bare", {}, "does not fit (got an unexpected keyword argument 'base_url')"),
        ("good.py:Needs", {"uri": 1}, "does not fit (missing a required argument: 'url')"),
        ("good.py:answer", {"retrys": 1}, "unexpected keyword argument 'retrys'"),
        ("command:", {}, "there is no program ''"),
        ("command: no_such_program x", {}, "there is no program 'no_such_program'"),
        ("command: sh -c 'x", {}, "No closing quotation"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_with_the_reason(name, options, why, folder):
    with pytest.raises(EnvironmentUnusable) as refused:
        load_agent(name, options)
    assert str(refused.value).startswith(name) and why in str(refused.value)


@pytest.mark.parametrize("name", ["good.py:answer", "good.py:part"])
def test_an_agent_knows_its_file(name, folder):
    assert load_agent(name, {}).file == folder / "good.py"
    assert load_agent(f"command: {sys.executable} x.py", {}).file is None


def _tasks(folder, items):
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return file


def test_every_tenth_task_is_held_out_and_none_of_too_few(folder):
    items = [{"id": n, "deep": {"a": [n, None]}} for n in range(20)]
    taskset = AgentTaskset("good.py:answer", data=str(_tasks(folder, items)))
    held_out = [row.id for row in taskset.rows("eval", None, 1)]
    assert sorted(held_out) == ["19", "9"]
    assert {row.id for row in taskset.rows("train", None, 1)} == {str(n) for n in range(20)} - {*held_out}
    few = AgentTaskset("good.py:answer", data=str(_tasks(folder, items[:5])))
    assert len(few.rows("train", None, 1)) == 5
    with pytest.raises(EnvironmentUnusable, match=r"^tasks=.*has 5 tasks.*eval_data=FILE$"):
        rows_of(few, "eval", None, 1)
    own = AgentTaskset("good.py:answer", data="tasks.jsonl", eval_data="tasks.jsonl")
    assert len(own.rows("eval", None, 1)) == len(own.rows("train", None, 1)) == 5


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([{"id": 1}, {"id": 1}], "gave two rows of the id '1'"),
        ([{"id": 1, "made": datetime.datetime(2026, 1, 1)}], "the data of row '1' is no JSON"),
        ([{"made": b"x"}], "the data of row 'train-0' is no JSON"),
        ([{"id": 0, "deep": {"a": [1, None]}}, {"id": 1, "deep": {"a": [2, None]}}], None),
    ],
)
def test_tasks_have_names_of_their_own_and_are_json(items, why, folder):
    pq.write_table(pa.Table.from_pylist(items), folder / "tasks.parquet")
    taskset = AgentTaskset("good.py:answer", data="tasks.parquet")
    if why is None:
        assert sorted(row.id for row in rows_of(taskset, "train", None, 1)) == ["0", "1"]
    else:
        with pytest.raises(EnvironmentUnusable, match=why):
            rows_of(taskset, "train", None, 1)


def test_the_options_of_an_agent_are_known_by_name(folder):
    with pytest.raises(
        EnvironmentUnusable, match=r"no option 'timout_s' \(did you mean 'timeout_s'\?\); there are"
    ):
        find("agent:good.py:answer").load(data="tasks.jsonl", timout_s=3)
    with pytest.raises(EnvironmentUnusable, match="could not convert string to float: 'much'"):
        find("agent:good.py:answer").load(data="tasks.jsonl", weights={"reward": "much"})


class Unreadable:
    def __repr__(self):
        raise ValueError("no text")


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no text")


REWARDS = [
    (np.float32(0.5), None),
    (Fraction(1, 2), None),
    (1, None),
    ((0.5,), None),
    ({"reward": 0.5, "format": 1}, None),
    (True, "the reward is True (bool), not a number"),
    (None, "the reward is None (NoneType), not a number"),
    ("1", "the reward is '1' (str), not a number"),
    (math.nan, "the reward is nan"),
    (1.5e308, "the reward is outside 0 to 1e+308"),
    ({"reward": 0.5, "format": False}, "the reward 'format' is False (bool), not a number"),
    ({}, "the rewards are an empty dict"),
    ([], "the rewards are an empty list"),
    ({1: 1.0}, "a reward's name is 1, not text"),
    (np.True_, "the reward is np.True_ (bool), not a number"),
    (Decimal(1), "the reward is Decimal('1') (Decimal), not a number"),
    (b"a", "the reward is b'a' (bytes), not a number"),
    (Unreadable(), "the reward is <Unreadable instance at"),
    ({Unreadable(): 1}, "a reward's name is <Unreadable instance at"),
    (10**400, "the reward is inf"),
    ({"reward": 10**400}, "the reward 'reward' is inf"),
    ([1e308], None),
]


@pytest.mark.parametrize(("returned", "fault"), REWARDS, ids=lambda value: type(value).__name__)
def test_whatever_an_agent_returns_is_a_reward_or_has_a_sentence(returned, fault, folder):
    found = RewardRule(0, 1e308).fault(returned)
    assert found is None if fault is None else (found or "").startswith(fault)


@pytest.mark.parametrize("returned", [[1e308, 1e308], {"a": 1e308, "b": 1e308}, {"a": 1e308, "b": -1e308}])
@pytest.mark.parametrize("weights", [{}, {"a": 10, "b": 10}])
def test_rewards_that_add_up_to_no_number_are_a_fault(returned, weights, folder):
    taskset = AgentTaskset("good.py:answer", data="tasks.jsonl", weights=weights)
    scored = taskset.scored(returned, 2)
    if returned == {"a": 1e308, "b": -1e308} and not weights:
        assert scored.reward == 0
    elif isinstance(returned, list) and weights:
        assert scored == "the weights name ['a', 'b'], and the agent returned no such reward"
    else:
        assert scored in ("the reward adds up to inf", "the reward adds up to nan")


def test_a_group_of_errors_is_told_by_its_first_and_an_unreadable_one_by_its_class():
    group = ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("no such town")])])
    assert one_line(group) == "ValueError: no such town"
    assert one_line(UnreadableError()) == "UnreadableError: (its text cannot be read)"
