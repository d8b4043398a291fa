"""The same agent with the OpenAI Agents SDK, as a command: `command: ITS_PYTHON tests/parts/agents_sdk.py`.

It imports nothing of this project: the task comes by standard input, the model and the search by variables.
"""

import asyncio
import json
import os
import re
import sys
import urllib.request

from agents import Agent, FunctionTool, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

TURNS, TOPK, CHARACTERS = 4, 2, 1024
SCHEMA = {
    "type": "object",
    "properties": {
        "query_list": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Search queries, each a short question or phrase that stands on its own.",
        }
    },
    "required": ["query_list"],
}


async def search(_context, arguments):
    queries = json.loads(arguments)["query_list"]
    body = json.dumps({"queries": queries, "topk": TOPK, "return_scores": False}).encode()
    asked = urllib.request.Request(
        f"{os.environ['SEARCH_URL']}/retrieve", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        results = json.load(answer)["result"]
    lines, number = [], 0
    for query, passages in zip(queries, results, strict=True):
        lines += [f"{query}:"] if len(queries) > 1 else []
        for passage in passages:
            number += 1
            lines.append(f"[{number}] {passage['title']}: {passage['text']}")
    return "\n".join(lines)[:CHARACTERS]


async def main():
    task = json.load(sys.stdin)
    set_tracing_disabled(True)
    tool = FunctionTool(
        name="search",
        description="Search the corpus. Returns the passages that fit each query best.",
        params_json_schema=SCHEMA,
        on_invoke_tool=search,
        strict_json_schema=False,
    )
    agent = Agent(name="searcher", model=os.environ["MODEL"], tools=[tool])
    try:
        said = str((await Runner.run(agent, task["messages"], max_turns=TURNS)).final_output)
    except MaxTurnsExceeded:
        said = ""
    answers = re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL)
    right = len(answers) == 1 and answers[0].strip().casefold() == task["answer"].strip().casefold()
    print(json.dumps({"reward": float(right)}))


asyncio.run(main())
