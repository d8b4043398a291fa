"""An OpenAI-compatible endpoint on loopback that plays challenger and solver over a small corpus, with tools.

The corpus has towns and rivers: a town lies on a river, a river rises in a region. Asked for two hops about a
town, the challenger looks the river up and asks for its region; about a river, which leads nowhere, it
gives the answer away. The solver searches and reads the answer off the passages, but every third seed is
wrong. Without a seed it is always right.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import served
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

MODEL, KEY = "scripted-model", "sk-planted-0123456789abcdef"
TOWNS = ("Drosken", "Velmar", "Ostrel", "Kestmoor", "Brisfal", "Tolvane")
RIVERS = ("Galmir", "Sendra", "Ulvit", "Pelgoth", "Marnes", "Ysker")
REGIONS = ("Tesk", "Orlund", "Kelm", "Vashti", "Nirrow", "Quend")


CORPUS = [
    {"id": town, "title": town, "text": f"{town} is a town of weavers that lies on the river {river}."}
    for town, river in zip(TOWNS, RIVERS, strict=True)
] + [
    {"id": river, "title": river, "text": f"{river} is a river that rises in the region of {region}."}
    for river, region in zip(RIVERS, REGIONS, strict=True)
]


def write_towns(folder: Path) -> Path:
    path = folder / "towns.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in CORPUS))
    return path


def agent_words(endpoint: str, checkpoints: Path) -> list[str]:
    """The overrides of an agent that is played here and searches an index of the towns."""
    model = [f"endpoint={endpoint}", f"endpoint_model={MODEL}", "api=chat"]
    index = ["chroma.collection=wiki", "retrieval.embedder=packaged-minilm"]
    return [*model, *index, f"paths.checkpoints={checkpoints}", "hardware=cpu"]


@dataclass
class Endpoint:
    """A running endpoint: what it was asked, and how it misbehaves."""

    url: str = ""
    drop_every: int = 0
    """Every so many requests one is answered with 503."""
    refuse_from: int = 0
    """From this request on, counted from 1, every one is refused with `refusal`; 0 for none."""
    refusal: int = 401
    delay_s: float = 0
    picky: bool = False
    """As OpenAI's reasoning models: neither max_tokens nor a temperature."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    keys: set[str] = field(default_factory=set)


@contextmanager
def scripted_endpoint(**misbehaviour: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(**misbehaviour)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> JSONResponse:
        endpoint.requests.append(body := await request.json())
        number = len(endpoint.requests)
        endpoint.keys.add(request.headers.get("authorization", ""))
        await asyncio.sleep(endpoint.delay_s)
        if 0 < endpoint.refuse_from <= number:
            return _error(endpoint.refusal, "as scripted")
        if request.headers.get("authorization") != f"Bearer {KEY}":
            given = request.headers.get("authorization", "none").removeprefix("Bearer ")
            return _error(401, f"Incorrect API key provided: {given}")
        if body["model"] != MODEL:
            return _error(404, f"The model {body['model']} does not exist")
        if endpoint.drop_every and number % endpoint.drop_every == 0:
            endpoint.dropped += 1
            return _error(503, "overloaded")
        if endpoint.picky and (named := next((p for p in ("max_tokens", "temperature") if p in body), None)):
            return _error(400, f"Unsupported parameter: {named}", "unsupported_parameter", named)
        return JSONResponse(answer(body))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    with served(app) as endpoint.url:
        yield endpoint


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The completion to a request, as OpenAI's format has it."""
    assert request["tools"][0]["function"]["name"] == "search"
    messages = request["messages"]
    said = messages[1]["content"]
    found = "\n".join(m["content"] for m in messages if m["role"] == "tool")
    turn = _ask(said, found) if "<document>" in said else _solve(said, found, int(request.get("seed", 1)))
    message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
    if not isinstance(turn, str):
        arguments = json.dumps({"query_list": turn})
        function = {"name": "search", "arguments": arguments}
        message["tool_calls"] = [{"id": "call_a", "type": "function", "function": function}]
        message["reasoning_content"] = "I have to look that up."
    finish = "stop" if isinstance(turn, str) else "tool_calls"
    words = sum(len(str(m.get("content") or "").split()) for m in messages)
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": words, "completion_tokens": 20, "total_tokens": words + 20},
    }


def _ask(prompt: str, found: str) -> str | list[str]:
    """The challenger's turn: a text, or the queries of a call."""
    document = prompt.partition("<document>")[2].partition("</document>")[0]
    hops = int(re.search(r"takes exactly (\d)", prompt)[1])  # type: ignore[index]
    subject = document.split()[0]
    if (river := re.search(r"on the river (\w+)", document)) and hops == 1:
        return _question(f"On which river does the town of {subject} lie?", river[1])
    if river:
        if not found:
            return [river[1]]
        region = re.search(rf"{river[1]} is a river that rises in the region of (\w+)", found)
        return _question(
            f"In which region rises the river on which the town of {subject} lies?",
            region[1] if region else "unknown",
        )
    region = re.search(r"region of (\w+)", document)
    assert region, document
    if hops == 1:
        return _question(f"In which region does the river {subject} rise?", region[1])
    return _question(f"Does the river {subject} rise in {region[1]}?", region[1])


def _solve(prompt: str, found: str, seed: int) -> str | list[str]:
    """The solver's turn: a text, or the queries of a call."""
    town, river = re.search(r"town of (\w+)", prompt), re.search(r"river (\w+) rise", prompt)
    subject = (town or river or ["", "nothing"])[1]
    lies = re.search(rf"{subject} is a town of weavers that lies on the river (\w+)", found)
    if not found:
        return [subject]
    if "On which river" in prompt:
        right = lies[1] if lies else "nothing"
    else:
        name = lies[1] if lies else subject
        rises = re.search(rf"{name} is a river that rises in the region of (\w+)", found)
        if rises is None and found.count("[1]") < 2:
            return [name]
        right = rises[1] if rises else "nothing"
    return f"<think>So it is.</think>\n<answer>{'Nowhere' if seed % 3 == 0 else right}</answer>"


def _question(question: str, right: str) -> str:
    return f"<think>I can ask.</think>\n<question>{question}</question>\n<answer>{right}</answer>"


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "scripted", "code": code, "param": param}
    return JSONResponse({"error": error}, status, headers={"retry-after": "0"})
