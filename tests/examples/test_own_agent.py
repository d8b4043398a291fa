"""The agent of the example, played through the gateway with a real search service."""

import asyncio
import json

import pytest
from told_model import Told

from environments.agent.taskset import AgentTaskset
from environments.row import Row
from verl_ext.episodes import EpisodeLimits, play_row

LIMITS = EpisodeLimits(prompt_tokens=1024, response_tokens=2048, tokens_per_turn=128)
TASK = {"question": "Which town lies on the river Galmir?", "answer": "Drosken"}


def calling(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("lines", "rewards", "heard"),
    [
        (["<answer>Drosken</answer>"], {"reward": 1, "searched": 0}, []),
        (
            [
                calling("search", query="a town on the Galmir"),
                calling("look_up", name="drosken"),
                "<answer>drosken</answer>",
            ],
            {"reward": 1, "searched": 1},
            ["Drosken: ", "Drosken: "],
        ),
        ([calling("look_up", name="Nowhere"), "No"], {"reward": 0, "searched": 1}, ["Nothing"]),
        ([calling("search", query="x")] * 4, {"reward": 0, "searched": 1}, [": "] * 3 + [None]),
        (["<answer>a</answer> <answer>Drosken</answer>"], {"reward": 0, "searched": 0}, []),
    ],
)
def test_the_example_searches_and_is_paid(lines, rewards, heard, towns, smollm2_tokenizer, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK))
    name, data = "examples/own_agent.py:answer", str(tmp_path / "tasks.jsonl")
    taskset = AgentTaskset(name, data=data, search=True, search_url=towns)
    model = Told(smollm2_tokenizer, *lines)
    (row,) = asyncio.run(play_row(taskset, Row("a", {"task": TASK}), model, LIMITS))
    assert row.fault is None and row.score.parts == rewards
    answers = [turn.answers[0]["content"] if turn.answers else None for turn in row.conversation.turns]
    for found, said in zip(answers, heard, strict=False):
        assert found is None if said is None else said in found
