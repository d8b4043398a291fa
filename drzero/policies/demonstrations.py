"""Warm-start demonstrations: conversations of a search agent in the demo world's `warmstart` split.

Assistant turns are the raw text a model has to generate. No entity of the `run` split occurs.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from data.demo_world import Chain, World
from data.world_language import RELATIONS
from verl_ext.method.answers import contains_answer
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import Message, challenger_messages, solver_messages
from verl_ext.method.search_calls import render_tool_call

Demonstration = dict[str, Any]  # kind ("challenger" or "solver"), hop, messages
Retrieve = Callable[[Sequence[str]], Sequence[Sequence[Mapping[str, str]]]]
"""Passages with title and text for each query."""


def make_demonstrations(
    world: World,
    *,
    challenger: Mapping[int, int],
    solver: Mapping[int, int],
    retrieve: Retrieve,
    seed: int = 0,
) -> list[Demonstration]:
    """Render so many by hop count, shuffled. Raises ValueError for another split or too few usable chains."""
    if world.split != "warmstart":
        raise ValueError(f"demonstrations need a world of the 'warmstart' split, got {world.split!r}")
    rng = random.Random(f"{seed}/demonstrations")
    writer = _Writer(world, retrieve, rng)
    wanted = [("challenger", writer.challenger, *each) for each in challenger.items()]
    wanted += [("solver", writer.solver, *each) for each in solver.items()]
    demonstrations: list[Demonstration] = []
    for kind, write, hop, count in wanted:
        conversations: list[list[Message]] = []
        chains = [chain for chain in world.chains if chain.hop == hop]
        for chain in rng.sample(chains, len(chains)):
            if len(conversations) == count:
                break
            with suppress(_PassageNotFound):
                conversations.append(write(chain))
        if len(conversations) < count:
            raise ValueError(
                f"{len(conversations)} usable chains of {hop} hops for {count} {kind} demonstrations: "
                "generate the world with more chains_per_hop"
            )
        demonstrations += [{"kind": kind, "hop": hop, "messages": chat} for chat in conversations]
    rng.shuffle(demonstrations)
    return demonstrations


def world_retriever(world: World, topk: int = 3) -> Retrieve:
    """A stand-in for search: named passages first, then passages that mention them, then any, shuffled."""
    passages = list(world.passages.values())

    def search(query: str) -> list[dict[str, str]]:
        rng = random.Random(f"{world.seed}/{query}")
        named = [passage for passage in passages if contains_answer(query, passage.title)]
        others = [passage for passage in rng.sample(passages, len(passages)) if passage not in named]
        others.sort(key=lambda passage: not any(thing.title in passage.text for thing in named))
        found = [*named, *others][:topk]
        return [{"title": p.title, "text": p.text} for p in rng.sample(found, len(found))]

    return lambda queries: [search(query) for query in queries]


class _PassageNotFound(Exception):
    """The search missed the passage of the chain's next step."""


class _Writer:
    def __init__(self, world: World, retrieve: Retrieve, rng: random.Random) -> None:
        self.world, self.retrieve, self.rng = world, retrieve, rng

    def challenger(self, chain: Chain) -> list[Message]:
        """From the chain's first document, through hop − 1 searches, to its question and answer."""
        first = self.world.passages[chain.doc_ids[0]]
        messages = challenger_messages(f"{first.title}\n{first.text}", chain.hop, "short")
        for step in range(1, chain.hop):
            said = self._fact(chain, step - 1)
            known = f"The document says {said}." if step == 1 else f"{said}."
            messages += self._search(chain, step, f"{known} I will search {chain.entities[step]}.")
        thought = f"{self._fact(chain, chain.hop - 1)}. I can ask for that."
        last = f"<question>{chain.question}</question>\n<answer>{chain.answer}</answer>"
        return [*messages, _assistant(thought, last)]

    def solver(self, chain: Chain) -> list[Message]:
        """From the question, through hop searches, to the answer."""
        messages = solver_messages(chain.question, "short")
        for step in range(chain.hop):
            known = f"{self._fact(chain, step - 1)}. " if step else ""
            messages += self._search(chain, step, f"{known}I will search {chain.entities[step]}.")
        thought = f"{self._fact(chain, chain.hop - 1)}."
        return [*messages, _assistant(thought, f"<answer>{chain.answer}</answer>")]

    def _search(self, chain: Chain, step: int, thought: str) -> list[Message]:
        name, relation = chain.entities[step], RELATIONS[chain.relations[step]]
        query = self.rng.choice((name, name, *relation.asks)).format(x=name)
        results = self.retrieve([query])
        if all(passage["title"] != name for passage in results[0]):
            raise _PassageNotFound
        response = {"role": "tool", "content": format_passages([query], results)}
        return [_assistant(thought, render_tool_call([query])), response]

    def _fact(self, chain: Chain, step: int) -> str:
        """Fact number `step` in its passage's words, such as "Zolvan Tarmek was born in Drosken"."""
        clauses = [
            clause.format(y=chain.entities[step + 1]) for clause in RELATIONS[chain.relations[step]].says
        ]
        text = self.world.passages[chain.doc_ids[step]].text
        return f"{chain.entities[step]} {next(clause for clause in clauses if clause in text)}"


def _assistant(thought: str, rest: str) -> Message:
    return {"role": "assistant", "content": f"<think>{thought}</think>\n{rest}"}
