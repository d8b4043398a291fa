"""An agent in plain OpenAI calls, with two tools over your own index (docs/agents.md):

    drzero agent-bench examples/own_agent.py:answer tasks=questions.jsonl retrieval.url=http://127.0.0.1:8000
    drzero train agent=examples/own_agent.py:answer tasks=questions.jsonl environment.options.search=true

A task is a line of questions.jsonl: {"question": "Where was … born?", "answer": "Vell"}.
"""

import json
import re

import httpx
from openai import AsyncOpenAI

PROMPT = "Answer the question, as short as you can, in <answer> </answer>. Search first.\n\n"
TOOLS = {
    "search": ("Search the documents.", {"query": "A short question or phrase."}),
    "look_up": ("Find a name in the titles of documents.", {"name": "The name."}),
}
ROUNDS = 4


def described(name):
    """A tool in OpenAI's form."""
    about, arguments = TOOLS[name]
    properties = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


async def call(name, arguments, search_url):
    """What a tool tells the model. Its mistakes are answered in words, so that it can learn from them."""
    if name not in TOOLS or set(arguments) != set(TOOLS[name][1]):
        return f"There is no such tool: write one of {', '.join(TOOLS)} with all its arguments."
    (words,) = map(str, arguments.values())
    body = {"queries": [words], "topk": 5}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(f"{search_url}/retrieve", json=body)
    (passages,) = answer.raise_for_status().json()["result"]
    if name == "look_up":
        passages = [one for one in passages if words.casefold() in one["title"].casefold()]
    return "\n".join(f"{one['title']}: {one['text']}" for one in passages[:2])[:1000] or "Nothing was found."


async def answer(task, endpoint):
    """Play one task. The rewards by name: whether it is right, and whether it searched at all."""
    messages = [{"role": "user", "content": PROMPT + task["question"]}]
    searches = 0
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(ROUNDS):
            asked = {"model": endpoint.model, "messages": messages, "tools": [*map(described, TOOLS)]}
            said = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for made in said.tool_calls:
                searches += 1
                arguments = json.loads(made.function.arguments)
                found = await call(made.function.name, arguments, endpoint.search_url)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": found})
    answers = re.findall(r"<answer>(.*?)</answer>", said.content or "", re.DOTALL)
    right = len(answers) == 1 and answers[0].strip().casefold() == task["answer"].casefold()
    return {"reward": float(right), "searched": float(searches > 0)}
