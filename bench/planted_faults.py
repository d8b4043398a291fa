"""Faults planted into clean pairs of the demo world: some for each gate to catch, and some it cannot see.

Clean pairs come from chains of known facts, each with a challenger trajectory that follows the chain
(drzero/policies/demonstrations.py). A `Fault` makes pairs faulty, `FILE_FAULTS` damage a written solver file.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from data.demo_world import Chain, World, compose_question, generate_world
from data.pairs import Pair, pair_of
from data.world_language import RELATIONS
from drzero.policies.demonstrations import make_demonstrations, world_retriever
from verl_ext.method.answers import contains_answer
from verl_ext.method.passages import format_passages
from verl_ext.method.search_calls import parse_tool_calls
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

Row = dict[str, Any]


@dataclass(frozen=True)
class Clean:
    """Pairs without faults. Chains, challenger prompts, sample records and pairs share one order."""

    world: World
    chains: list[Chain]
    prompts: list[Row]
    records: list[Row]
    pairs: list[Pair]


def clean_pairs(seed: int, per_hop: int, passages: int = 240) -> Clean:
    """`per_hop` pairs of each of 1 to 4 hops."""
    world = generate_world(seed, "warmstart", passages=passages, chains_per_hop=3 * per_hop)
    counts = {hop: per_hop for hop in (1, 2, 3, 4)}
    shown = make_demonstrations(
        world, challenger=counts, solver={}, retrieve=world_retriever(world), seed=seed
    )
    by_question = {chain.question: chain for chain in world.chains}
    clean = Clean(world, [], [], [], [])
    for index, demonstration in enumerate(shown):
        trajectory = _trajectory(demonstration["messages"])
        chain = next(
            by_question[found[1]]
            for found in [re.search(r"<question>(.*?)</question>", trajectory.final_text)]
            if found
        )
        passage = world.passages[chain.doc_ids[0]]
        document = f"{passage.title}\n{passage.text}"
        row = prompt_row(index, chain.hop, passage.id, document, demonstration["messages"][:1])
        record = {
            "prompt_index": index,
            "sample": 0,
            "seed": 1000 + index,
            "trajectory": trajectory.to_dict(),
        }
        pair = pair_of(record, row)
        assert isinstance(pair, Pair), pair
        clean.chains.append(chain)
        clean.prompts.append(row)
        clean.records.append(record)
        clean.pairs.append(pair)
    return clean


def prompt_row(index: int, hop: int, doc_id: str, document: str, prompt: list[dict[str, str]]) -> Row:
    """The fields of a challenger prompt row that a pair needs."""
    return {
        "prompt": prompt,
        "extra_info": {"index": index, "hop": hop, "doc_id": doc_id, "document": document},
        "metadata": {"corpus_id": "demo", "document_sha256": sha256(document.encode()).hexdigest()},
    }


def _trajectory(messages: Sequence[Mapping[str, str]]) -> Trajectory:
    """A demonstration in the form of a recorded conversation."""
    turns = []
    for message, following in zip(messages[1:], [*messages[2:], {"role": "", "content": ""}], strict=True):
        if message["role"] == "assistant":
            calls = parse_tool_calls(message["content"])
            answered = tuple(replace(call, response=following["content"]) for call in calls)
            turns.append(Turn(message["content"], answered))
    return Trajectory(tuple(turns))


# --- faults of a pair --------------------------------------------------------------------------------------

Change = Callable[[Clean, int, random.Random], Pair | None]
"""The faulty form of clean pair number i, or None if the fault does not apply."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault, the gate it is for, and whether that gate can see it at all."""

    gate: str
    name: str
    change: Change
    visible: bool = True

    def plant(self, clean: Clean, seed: int) -> list[Pair]:
        """One faulty pair from each clean one that it applies to, under new prompt numbers."""
        rng = random.Random(f"{seed}/{self.gate}/{self.name}")
        changed = (self.change(clean, i, rng) for i in range(len(clean.pairs)))
        return [
            replace(pair, prompt_index=len(clean.pairs) + pair.prompt_index)
            for pair in changed
            if pair is not None
        ]


def asking(template: str) -> Change:
    """The question in a template: `q` as it is, `bare` without its mark, `low` with a small first letter."""

    def change(clean: Clean, i: int, rng: random.Random) -> Pair:
        q = clean.pairs[i].question
        parts = {"q": q, "bare": q[:-1], "low": q[0].lower() + q[1:], "answer": clean.pairs[i].answer}
        return replace(clean.pairs[i], question=template.format(**parts))

    return change


def _evidence_text(pair: Pair) -> str:
    responses = [call.response or "" for call in pair.trajectory.searches]
    return "\n".join([pair.document, *responses])


def _unfounded_answer(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """The answer of another chain with the same last relation: of the right kind, but without evidence."""
    pair = clean.pairs[i]
    kin = {chain.answer for chain in clean.chains if chain.relations[-1] == clean.chains[i].relations[-1]}
    others = sorted(answer for answer in kin if not contains_answer(_evidence_text(pair), answer))
    return replace(pair, answer=rng.choice(others)) if others else None


def _wrong_but_present(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    others = other_facts(clean, i)
    return replace(clean.pairs[i], answer=rng.choice(others)) if others else None


def other_facts(clean: Clean, i: int) -> list[str]:
    """The other facts of the last passage of clean pair number i, as far as its texts have them."""
    pair, chain = clean.pairs[i], clean.chains[i]
    facts = [
        clean.world.name(thing)
        for (subject, _), thing in clean.world.facts.items()
        if subject == chain.doc_ids[-1]
    ]
    return [name for name in facts if name != pair.answer and contains_answer(_evidence_text(pair), name)]


def _other_question(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    other = rng.choice(
        [pair for pair in clean.pairs if pair.hop == clean.pairs[i].hop and pair != clean.pairs[i]]
    )
    return replace(clean.pairs[i], question=other.question)


def _other_conversation(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """Question, answer and trajectory of another prompt with as many hops."""
    pair = clean.pairs[i]
    other = rng.choice(
        [pair for pair in clean.pairs if pair.hop == clean.pairs[i].hop and pair != clean.pairs[i]]
    )
    return replace(pair, question=other.question, answer=other.answer, trajectory=other.trajectory)


def _without_a_search(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    turns = clean.pairs[i].trajectory.turns
    if len(turns) < 2:
        return None
    gone = rng.randrange(len(turns) - 1)
    return replace(clean.pairs[i], trajectory=Trajectory((*turns[:gone], *turns[gone + 1 :])))


def _changed_calls(clean: Clean, i: int, change: Callable[[SearchCall], SearchCall]) -> Pair | None:
    pair = clean.pairs[i]
    if not pair.trajectory.calls:
        return None
    turns = tuple(replace(turn, calls=tuple(map(change, turn.calls))) for turn in pair.trajectory.turns)
    return replace(pair, trajectory=Trajectory(turns))


def _unanswered_search(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    return _changed_calls(clean, i, lambda call: replace(call, response=None, failed=True, error="503"))


def _searching(change: Callable[[tuple[Turn, ...]], tuple[Turn, ...]], least_hop: int) -> Change:
    """The turns with a changed search, for chains with enough hops."""

    def changed(clean: Clean, i: int, rng: random.Random) -> Pair | None:
        pair = clean.pairs[i]
        *searches, last = pair.trajectory.turns
        if pair.hop < least_hop:
            return None
        return replace(pair, trajectory=Trajectory((*change(tuple(searches)), last)))

    return changed


def _same_search(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return turns[-1:] * len(turns)


def _all_at_once(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return (replace(turns[0], calls=tuple(call for turn in turns for call in turn.calls)),)


def _no_results(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    return _changed_calls(clean, i, lambda call: replace(call, response=format_passages(["query"], [[]])))


def _answered_by_document(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    pair = clean.pairs[i]
    return replace(pair, document=f"{pair.document} Then came {pair.answer}.") if pair.hop >= 2 else None


def _names_what_it_found(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """Asks for the last fact alone, by the name that the last search was for."""
    pair, chain = clean.pairs[i], clean.chains[i]
    if pair.hop < 2:
        return None
    *turns, search, last = pair.trajectory.turns
    named = replace(
        search, calls=tuple(replace(call, queries=(chain.entities[-2],)) for call in search.calls)
    )
    question = compose_question(chain.entities[-2], chain.relations[-1:], rng)
    return replace(pair, question=question, trajectory=Trajectory((*turns, named, last)))


def _unhelpful(clean: Clean, pair: Pair, rng: random.Random) -> list[dict[str, str]]:
    passages = [
        passage
        for passage in clean.world.passages.values()
        if not contains_answer(f"{passage.title} {passage.text}", pair.answer)
    ]
    return [{"title": passage.title, "text": passage.text} for passage in rng.sample(passages, 3)]


def _nothing_found(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """Every search returns passages without the answer."""
    shown = _unhelpful(clean, clean.pairs[i], rng)
    if contains_answer(clean.pairs[i].document, clean.pairs[i].answer):
        return None
    return _changed_calls(clean, i, lambda call: replace(call, response=format_passages(["query"], [shown])))


def _echoed_answer(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """As above, and the model searches for its own answer: queries are repeated above their passages."""
    pair = clean.pairs[i]
    shown = _unhelpful(clean, pair, rng)
    if contains_answer(pair.document, pair.answer):
        return None
    queries = (pair.answer, "the answer")
    return _changed_calls(
        clean,
        i,
        lambda call: replace(
            call, queries=queries, response=format_passages(queries, [shown[:2], shown[2:]])
        ),
    )


def rephrased(clean: Clean, i: int, rng: random.Random) -> str | None:
    """The question of clean pair number i in other words, or None."""
    chain = clean.chains[i]
    phrasings = {compose_question(chain.entities[0], chain.relations, rng) for _ in range(8)} - {
        chain.question
    }
    return rng.choice(sorted(phrasings)) if phrasings else None


def _rephrased_of_hops(*hops: int) -> Change:
    def change(clean: Clean, i: int, rng: random.Random) -> Pair | None:
        question = rephrased(clean, i, rng) if clean.pairs[i].hop in hops else None
        return replace(clean.pairs[i], question=question) if question else None

    return change


def _rephrased_other_answer(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    question = rephrased(clean, i, rng)
    return (
        replace(clean.pairs[i], question=question, answer=f"it is {clean.pairs[i].answer}")
        if question
        else None
    )


def _misspelt(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """Two letters of one long word change places."""
    question = clean.pairs[i].question
    places = [found.start() + 2 for found in re.finditer(r"\b[a-z]{5,}", question)]
    places = [place for place in places if question[place] != question[place + 1]]
    if not places:
        return None
    at = rng.choice(places)
    return replace(
        clean.pairs[i],
        question=question[:at] + question[at + 1] + question[at] + question[at + 2 :],
    )


def _replaced_word(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    words = clean.pairs[i].question.split()
    words[rng.randrange(len(words))] = "respectively"
    return replace(clean.pairs[i], question=" ".join(words))


def _part_of_answer(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    pair = clean.pairs[i]
    words = pair.answer.split()
    return replace(pair, question=f"{pair.question[:-1]}, {words[-1]}?") if len(words) > 1 else None


def _topic(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """The topic of the question, without asking anything."""
    chain = clean.chains[i]
    phrase = chain.entities[0]
    for relation in chain.relations[:-1]:
        phrase = rng.choice(RELATIONS[relation].means).format(x=phrase)
    return replace(clean.pairs[i], question=f"A question about {phrase}")


def _passage_as_answer(clean: Clean, i: int, rng: random.Random) -> Pair | None:
    """A whole sentence of the last passage that holds the answer."""
    text = clean.world.passages[clean.chains[i].doc_ids[-1]].text
    sentences = [each for each in text.split(". ") if contains_answer(each, clean.pairs[i].answer)]
    return replace(clean.pairs[i], answer=f"{sentences[0]}, as it has been for as long as anyone remembers")


def _in_capitals(clean: Clean, i: int, rng: random.Random) -> Pair:
    return replace(clean.pairs[i], question=clean.pairs[i].question.upper().replace("?", " !"))


def _another_answer(clean: Clean, i: int, rng: random.Random) -> Pair:
    return replace(clean.pairs[i], answer="something else")


FAULTS = (
    Fault("evidence", "answer replaced by one without evidence", _unfounded_answer),
    Fault("evidence", "searches found nothing about the answer", _nothing_found),
    Fault("evidence", "answer only in the model's own query", _echoed_answer),
    Fault("evidence", "conversation of another prompt", _other_conversation, visible=False),
    Fault("evidence", "wrong answer from the passage", _wrong_but_present, visible=False),
    Fault("evidence", "question of another chain", _other_question),
    Fault("hops", "one search taken out", _without_a_search),
    Fault("hops", "searches failed", _unanswered_search),
    Fault("hops", "the same search again and again", _searching(_same_search, 3)),
    Fault("hops", "all searches in one turn", _searching(_all_at_once, 3)),
    Fault("hops", "searches without results", _no_results),
    Fault("hops", "answer in the document", _answered_by_document),
    Fault("hops", "asks by the name that it searched for", _names_what_it_found),
    Fault("integrity", "answer in the question", asking("{bare}, {answer}?")),
    Fault("integrity", "last word of the answer in the question", _part_of_answer),
    Fault("integrity", "statement", asking("I wonder {bare}.")),
    Fault("integrity", "topic", _topic),
    Fault("integrity", "exclamation", asking("What a good question!")),
    Fault("integrity", "tag left over", asking("<question>{q}")),
    Fault("integrity", "placeholder left over", asking("{bare} [insert name]?")),
    Fault("integrity", "braces left over", asking("{bare} of {{document}}?")),
    Fault("integrity", "words of the prompt", asking("Here is your question: {q}")),
    Fault("integrity", "according to the document", asking("According to the document, {low}")),
    Fault("integrity", "mentioned in the passage", asking("{bare} mentioned in the passage?")),
    Fault("integrity", "as described earlier", asking("{bare}, as described earlier?")),
    Fault("integrity", "whole sentence as answer", _passage_as_answer),
    Fault("duplicates", "capitals and punctuation", _in_capitals),
    Fault("duplicates", "articles and dots", asking("The {low} ...")),
    Fault("duplicates", "another answer", _another_answer),
    Fault("near_duplicates", "rephrased, 1 hop", _rephrased_of_hops(1)),
    Fault("near_duplicates", "rephrased, 2 hops", _rephrased_of_hops(2)),
    Fault("near_duplicates", "rephrased, 3 or 4 hops", _rephrased_of_hops(3, 4)),
    Fault("near_duplicates", "misspelt", _misspelt),
    Fault("near_duplicates", "rephrased, answer in other words", _rephrased_other_answer),
    Fault("contamination", "copied", asking("{q}")),
    Fault("contamination", "capitals and punctuation", _in_capitals),
    Fault("contamination", "words put in front", asking("Can you tell me, {low}")),
    Fault("contamination", "one word replaced", _replaced_word),
    Fault("contamination", "rephrased", _rephrased_of_hops(1, 2, 3, 4)),
)


# --- faults of a written file ------------------------------------------------------------------------------

FileFault = Callable[[list[Row], int, int], None]
"""Damages rows of a solver file in place, given the numbers of two rows."""

_PLACES = {
    "question": ("extra_info", "question"),
    "answer": ("reward_model", "ground_truth"),
    "prompt": ("prompt",),
    "document": ("extra_info", "document"),
    "document id": ("extra_info", "doc_id"),
    "document hash": ("metadata", "document_sha256"),
    "trajectory": ("metadata", "trajectory"),
    "seed": ("metadata", "seed"),
    "index": ("extra_info", "index"),
}
_QUESTION = ("question", "answer", "prompt")
_DOCUMENT = ("document", "document id", "document hash")


def _swap(*names: str) -> FileFault:
    def damage(rows: list[Row], one: int, other: int) -> None:
        for name in names:
            *path, last = _PLACES[name]
            ours, theirs = rows[one], rows[other]
            for key in path:
                ours, theirs = ours[key], theirs[key]
            ours[last], theirs[last] = theirs[last], ours[last]

    return damage


def _set(value: Any, *path: str) -> FileFault:
    """Another value in a field that is the same in every row."""

    def damage(rows: list[Row], one: int, other: int) -> None:
        row = rows[one]
        for key in path[:-1]:
            row = row[key]
        row[path[-1]] = value

    return damage


def _lose(rows: list[Row], one: int, other: int) -> None:
    del rows[one]


def _double(rows: list[Row], one: int, other: int) -> None:
    rows[one] = deepcopy(rows[other])


FILE_FAULTS: dict[str, FileFault] = {
    **{f"{name} swapped": _swap(name) for name in _PLACES},
    "answer and prompt swapped": _swap("answer", "prompt"),
    "question, answer and prompt swapped": _swap(*_QUESTION),
    "document with id and hash swapped": _swap(*_DOCUMENT),
    "whole conversation swapped": _swap(*_QUESTION, "trajectory", "seed"),
    "data source of a benchmark": _set("searchR1_nq", "data_source"),
    "data source of the tool": _set(
        "searchR1_nq", "extra_info", "tools_kwargs", "search", "create_kwargs", "data_source"
    ),
    "agent of another name": _set("single_turn_agent", "agent_name"),
    "reward by a model": _set("model", "reward_model", "style"),
    "split of the other file": _set("val", "extra_info", "split"),
    "no tools": _set(False, "extra_info", "need_tools_kwargs"),
    "another challenger": _set("challenger_iter0_hf@0", "metadata", "generator_checkpoint"),
    "row lost": _lose,
    "row written over another": _double,
}


def damaged(rows: Sequence[Row], fault: FileFault, trials: int, seed: int) -> Iterator[list[Row]]:
    """The rows with the fault at a random place, `trials` times, on two rows that differ in every field."""
    rng = random.Random(seed)
    for _ in range(trials):
        one, other = rng.sample(range(len(rows)), 2)
        while any(_value(rows[one], place) == _value(rows[other], place) for place in _PLACES.values()):
            one, other = rng.sample(range(len(rows)), 2)
        copy = deepcopy(list(rows))
        fault(copy, one, other)
        yield copy


def _value(row: Row, place: Sequence[str]) -> Any:
    for key in place:
        row = row[key]
    return row
