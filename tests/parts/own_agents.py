"""The demo's search agent written with clients of other projects, as a user would bring it.

SEARCH_URL names the retrieval service, as these agents have no part in the run's own search.
"""

import os
from typing import Any

from environments.agent.contract import Endpoint
from search.client import SearchClient
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import solver_messages
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.tool_calls import SEARCH_TOOL_SCHEMA
from verl_ext.method.trajectory import Trajectory, Turn

TURNS, TOPK, CHARACTERS = 4, 2, 1024  # as config/model/demo-policy.yaml


async def search(query_list: list[str]) -> str:
    """The passages that fit each query best."""
    client = SearchClient(os.environ["SEARCH_URL"], topk=TOPK)
    return format_passages(query_list, await client.retrieve(query_list), CHARACTERS)


def reward(text: str, task: dict[str, Any]) -> dict[str, float]:
    """As the environment `search` scores its last turn."""
    scored = solver_reward(Trajectory((Turn(text),)), [task["answer"]])
    return {"reward": scored.score, "f1": scored.f1}


async def plain_openai(task: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """OpenAI's chat completions."""
    import json

    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [*solver_messages(task["question"], "short")]
    for turn in range(1, TURNS + 1):
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[SEARCH_TOOL_SCHEMA]
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls or turn == TURNS:
            break
        for call in said.tool_calls:
            found = await search(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return reward(said.content or "", task)
