"""A scripted teacher: a chat endpoint that plays challenger and solver over a package corpus, and lies.

    python -m examples.package_corpus
    python -m bench.teacher --port 9100 --lies 0.1 --answers answers.jsonl
    drzero preview source=outputs/packages/corpus.jsonl endpoint=http://127.0.0.1:9100/v1 model=demo-policy
    python -m bench.lies answers.jsonl outputs/checkpoints/preview

It has no answer key: it reads the document in the prompt and the passages of its searches. In a share of its
questions, and of its attempts, it gives another value of the same kind: half of the time one that stands in
something it read. `--answers` gets a line for every final answer, with the right one next to it.
"""

import argparse
import json
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from data.leaks import given_away
from drzero.ops.records import append_json_lines
from examples.package_language import REQUIRES, ask, facts_in, read_question, say
from verl_ext.method.answers import contains_answer
from verl_ext.method.passages import shown_passages
from verl_ext.method.prompts import MAX_TURNS

MODEL = "teacher"
_DOCUMENT = re.compile(r"<document>\n(.*)\n</document>", re.DOTALL)
_HOPS = re.compile(r"(?:Write a |takes exactly )(\d+)")
_QUESTION = re.compile(r"Answer th(?:e|is) question\.[^\n]*\n\n(.*?)(?=\n\n- |\Z)", re.DOTALL)
_QUERIES = ("{x}", "{x} package", "What is {x}?")
_WONDERS = ("I have to look up {x}.", "What does {x} say about itself?", "I need the facts about {x}.")
_INVENTED = {
    "author": ("Ingrid Aalto", "Tomas Berling", "Priya Raman", "Ivo Castell", "Noor Hadid", "Lena Okafor"),
    "licence": ("EUPL-1.2", "Artistic-2.0", "Zlib", "BSL-1.0", "UPL-1.0", "AFL-3.0"),
    "python": ("2.4", "2.5", "3.3", "3.5", "3.13", "3.14"),
    "release": ("0.83.4", "1.96.0", "2.71.5", "6.19.2", "7.3.12", "11.0.7"),
    "account": ("northlight", "papercrane", "quietriver", "stonefruit", "tallgrass", "owlworks"),
    REQUIRES: ("simplefmt", "corewire", "pathkit", "bytebox", "loopguard", "textmill"),
}


@dataclass(frozen=True)
class Search:
    """A turn that looks up a package."""

    title: str
    query: str


@dataclass(frozen=True)
class Answer:
    """The last turn. `lie`: "passage" if something it read states the false answer, "invented" if not."""

    role: str
    question: str
    answer: str
    right: str
    lie: str | None
    thought: str


@dataclass
class Conversation:
    """What a conversation has shown, facts by title. `rng` begins anew in each turn."""

    rng: random.Random
    lie: str | None
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    text: str = ""
    queries: list[str] = field(default_factory=list)

    def read(self, title: str, text: str) -> None:
        """Note a document."""
        self.facts[title] = facts_in(text) | self.facts.get(title, {})
        self.text += f"\n{title}: {text}"

    def search(self, title: str) -> Search | None:
        """Look a package up with a new query, while there are turns left."""
        fresh = [form.format(x=title) for form in _QUERIES]
        fresh = [query for query in fresh if query not in self.queries]
        left = len(self.queries) < MAX_TURNS - 1
        return Search(title, self.rng.choice(fresh)) if fresh and left else None

    def others(self, name: str, right: str) -> list[str]:
        """The other values of a fact that it has read."""
        return sorted({facts[name] for facts in self.facts.values() if name in facts} - {right})

    def answer(self, role: str, question: str, title: str, name: str) -> Answer:
        """Answer with the fact, or with a lie."""
        right = value = self.facts[title][name]
        lie = self.lie
        if lie == "passage" and (others := self.others(name, right)):
            value = self.rng.choice(others)
        elif lie:
            unread = [one for one in _INVENTED[name] if not contains_answer(self.text, one)]
            lie, value = "invented", self.rng.choice(unread)
        return Answer(role, question, value, right, lie, say(name, title, value, self.rng))


def challenge(document: str, hops: int, so_far: Conversation) -> Search | Answer:
    """Follow first requirements, then ask for a fact of the last package. Fewer hops if one leads nowhere."""
    title, _, text = document.partition("\n")
    so_far.read(title, text)
    path = [title]
    while len(path) < hops and (needed := so_far.facts[path[-1]].get(REQUIRES)):
        if needed in so_far.facts:
            path.append(needed)
        elif search := so_far.search(needed):
            return search
        else:
            break
    known = so_far.facts[path[-1]]
    elsewhere = document if len(path) > 1 else ""
    hidden = [
        name
        for name, value in known.items()
        if not given_away(title, value) and not contains_answer(elsewhere, value)
    ]
    if not known:
        raise ValueError(f"the document of {path[-1]} states no fact of a package")
    name = so_far.rng.choice(hidden or list(known))
    if so_far.lie == "passage" and not so_far.others(name, known[name]) and (more := so_far.search(title)):
        return more
    question = ask(title, (*[REQUIRES] * (len(path) - 1), name), so_far.rng)
    return so_far.answer("challenger", question, path[-1], name)


def solve(question: str, so_far: Conversation) -> Search | Answer:
    """Look up each package on the way, and read the answer off the last."""
    title, names = read_question(question) or ("", ())
    for number, name in enumerate(names, start=1):
        if name not in so_far.facts.get(title, {}):
            return so_far.search(title) or _unknown(question)
        if number < len(names):
            title = so_far.facts[title][name]
    return so_far.answer("solver", question, title, names[-1]) if names else _unknown(question)


def _unknown(question: str) -> Answer:
    return Answer("solver", question, "unknown", "unknown", None, "I cannot find it.")


class Teacher:
    """Answers chat requests, equal ones equally. `lies` is a share; `answers` gets the last turns."""

    def __init__(self, lies: float = 0.0, answers: Path | None = None) -> None:
        self.lies, self.answers = lies, answers

    def app(self) -> FastAPI:
        """Return the endpoint."""
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> JSONResponse:
            try:
                return JSONResponse(self.complete(await request.json()))
            except (LookupError, TypeError, ValueError) as error:
                words = f"the teacher knows this project's two prompts and packages alone: {error!r}"
                return JSONResponse({"error": {"message": words}}, 400)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

        return app

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the completion. Raises LookupError, TypeError or ValueError for what it cannot play."""
        messages = request["messages"]
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        rng = random.Random(f"{request.get('seed')}/{prompt}")
        lie = rng.choice(("passage", "invented")) if rng.random() < self.lies else None
        so_far = Conversation(rng, lie)
        for message in messages:
            for call in message.get("tool_calls") or ():
                so_far.queries += json.loads(call["function"]["arguments"])["query_list"]
            for passage in shown_passages(message["content"]) if message["role"] == "tool" else ():
                title, _, text = passage.partition(": ")
                so_far.read(title, text)
        turn = _turn(prompt, so_far)
        if isinstance(turn, Answer) and self.answers:
            append_json_lines(self.answers, asdict(turn))
        words = sum(len(str(message.get("content")).split()) for message in messages)
        return {
            "object": "chat.completion",
            "choices": [{"index": 0, **_choice(turn, rng)}],
            "usage": {"prompt_tokens": words, "completion_tokens": 20, "total_tokens": words + 20},
        }


def _turn(prompt: str, so_far: Conversation) -> Search | Answer:
    document, hops, question = (form.search(prompt) for form in (_DOCUMENT, _HOPS, _QUESTION))
    if document and hops:
        return challenge(document[1], int(hops[1]), so_far)
    if question:
        return solve(question[1], so_far)
    raise ValueError("neither a document nor a question")


def _choice(turn: Search | Answer, rng: random.Random) -> dict[str, Any]:
    if isinstance(turn, Search):
        thought = f"<think>{rng.choice(_WONDERS).format(x=turn.title)}</think>"
        function = {"name": "search", "arguments": json.dumps({"query_list": [turn.query]})}
        call = {"id": "call_a", "type": "function", "function": function}
        return {
            "message": {"role": "assistant", "content": thought, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }
    asked = f"<question>{turn.question}</question>\n" if turn.role == "challenger" else ""
    said = f"<think>{turn.thought}</think>\n{asked}<answer>{turn.answer}</answer>"
    return {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}


def main() -> None:
    """Serve the teacher on loopback until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--lies", type=float, default=0.0, help="share of false answers, between 0 and 1")
    parser.add_argument("--answers", type=Path, help="a file to which every final answer is added")
    given = parser.parse_args()
    uvicorn.run(
        Teacher(given.lies, given.answers).app(), host="127.0.0.1", port=given.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
