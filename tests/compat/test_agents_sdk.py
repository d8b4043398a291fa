"""The OpenAI Agents SDK, which needs packages that this project cannot have, as an agent that is a command.

make compat      # DRZERO_COMPAT=1; makes an environment with openai-agents
"""

import asyncio
import json
from pathlib import Path

from other_environment import environment, only_by_make_compat
from scripted_search import serving
from told_model import Told

from environments.agent.taskset import AgentTaskset
from environments.row import Row
from verl_ext.episodes import EpisodeLimits, play_row
from verl_ext.method.chat import demo_chat_template

only_by_make_compat("makes an environment with openai-agents")

AGENT = Path(__file__).parents[1] / "parts" / "agents_sdk.py"
LIMITS = EpisodeLimits(prompt_tokens=512, response_tokens=512, tokens_per_turn=128)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["town"]}}\n</tool_call>'


def test_its_calls_are_one_row_of_the_sampled_ids(tmp_path, tmp_path_factory, smollm2_tokenizer):
    smollm2_tokenizer.chat_template = demo_chat_template()
    python = environment(tmp_path_factory, "openai-agents")
    task = {"messages": [{"role": "user", "content": "Where is Vell?"}], "answer": "Vell"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    model = Told(smollm2_tokenizer, CALL, "It is <answer>Vell</answer>.")
    passage = {"id": "vell", "title": "Vell", "text": "A town.", "contents": ""}
    with serving((200, {"result": [[passage]]})) as search:
        words = {"data": str(tmp_path / "tasks.jsonl"), "search": True, "search_url": search.url}
        taskset = AgentTaskset(f"command: {python} {AGENT}", **words)
        (row,) = asyncio.run(play_row(taskset, Row("a", {"task": task}), model, LIMITS))
    (first_in, first_out), (second_in, second_out) = model.log
    assert row.fault is None and row.score.reward == 1.0 and row.token_drift == 0
    assert row.prompt_ids + row.response_ids == second_in + second_out
    assert second_in[: len(first_in + first_out)] == first_in + first_out
