"""The demo world: the chains are checked by parsing their questions, independently of the generator."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from data.demo_world import HOPS, Chain, World, chain_leaks, generate_world, split_of, write_world
from data.errors import DataError
from data.world_language import FIRM_NOUNS, RELATIONS, WORK_NOUNS
from drzero.stages.demo import EVALUATION_SHARE, WORLD_SEED


@pytest.fixture(scope="module")
def world():
    return generate_world(0)


def resolve(phrase: str, world: World, last: bool = True) -> set[str]:
    """Every thing that a question (`last`) or a noun phrase may mean, by undoing the phrasings."""
    meant = {entity.id for entity in world.entities.values() if entity.name == phrase}
    for name, relation in RELATIONS.items():
        for template in relation.asks if last else relation.means:
            before, after = template.split("{x}")
            if match := re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", phrase):
                subjects = resolve(match[1], world, last=False)
                meant |= {world.facts[s, name] for s in subjects if (s, name) in world.facts}
    return meant


def invented_words(world: World) -> set[str]:
    return {word for entity in world.entities.values() for word in entity.name.split()} - {
        "The",
        *FIRM_NOUNS,
        *WORK_NOUNS,
    }


def test_same_seed_gives_the_same_bytes(tmp_path):
    for folder in ("a", "b"):
        write_world(generate_world(3), tmp_path / folder)
    for name in ("corpus.jsonl", "chains.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert generate_world(3).passages.keys() != generate_world(1).passages.keys()


@pytest.mark.parametrize("seeds", [(0, 0), (1, 2)])
def test_splits_share_no_invented_word(seeds):
    run, warm = generate_world(seeds[0], "run"), generate_world(seeds[1], "warmstart")
    assert invented_words(run).isdisjoint(invented_words(warm))
    assert {split_of(word) for word in invented_words(run)} == {"run"}


def test_names_are_unique(world):
    names = [entity.name for entity in world.entities.values()]
    assert len(names) == len(set(names)) == 240
    words = [word for entity in world.entities.values() for word in entity.name.split()]
    invented = invented_words(world)
    assert max(Counter(word for word in words if word in invented).values()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_question_read_backwards_has_exactly_its_answer(seed):
    world = generate_world(seed)
    for chain in world.chains:
        assert {world.name(thing) for thing in resolve(chain.question, world)} == {chain.answer}, chain


def test_each_fact_of_a_chain_is_in_its_passage(world):
    for chain in world.chains:
        assert len(chain.doc_ids) == len(chain.relations) == chain.hop == len(chain.entities) - 1
        for doc_id, relation, (subject, thing) in zip(
            chain.doc_ids, chain.relations, pairwise(chain.entities), strict=True
        ):
            passage = world.passages[doc_id]
            assert passage.title == subject
            assert any(clause.format(y=thing) in passage.text for clause in RELATIONS[relation].says)


def test_an_answer_occurs_in_the_last_passage_only(world):
    def words(text: str) -> str:
        return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower().replace('the ', '')))} "

    for chain in world.chains:
        *early, last = (f"{world.passages[doc].title} {world.passages[doc].text}" for doc in chain.doc_ids)
        assert words(chain.answer) in words(last)
        assert not any(words(chain.answer) in words(text) for text in (chain.question, *early))


def test_a_shortcut_and_an_answer_in_the_question_are_reported_as_leaks(world):
    one_hop = next(chain for chain in world.chains if chain.hop == 1)
    first = world.passages[one_hop.doc_ids[0]]
    other = next(iter(world.passages.keys() - {first.id}))
    shortcut = Chain("x", 2, "Who?", one_hop.answer, (first.id, other), ("a", "b", "c"), ("r", "s"))
    assert chain_leaks(shortcut, world)
    assert not chain_leaks(one_hop, world)
    assert chain_leaks(Chain("x", 1, "Is it the Oak?", "oak", (other,), ("a", "oak"), ("r",)), world)


def test_chains_start_at_many_documents(world):
    for hop in HOPS:
        assert len({chain.doc_ids[0] for chain in world.chains if chain.hop == hop}) >= 90


@pytest.mark.parametrize("seed", range(WORLD_SEED, WORLD_SEED + 3))
def test_chains_of_a_share_of_the_passages_are_in_a_land_that_no_other_passage_names(seed):
    held = generate_world(seed, chain_share=EVALUATION_SHARE)
    assert Counter(chain.hop for chain in held.chains) == dict.fromkeys(HOPS, 100)
    documents = {doc_id for chain in held.chains for doc_id in chain.doc_ids}
    assert len(documents) == 96  # all of the land, so that holding these out leaves none of it
    asked_about = {name for chain in held.chains for name in chain.entities}
    outside = [passage for doc_id, passage in held.passages.items() if doc_id not in documents]
    names = {entity.name for entity in held.entities.values()} & asked_about
    assert len(outside) == 144 and len(names) == 96
    assert not [name for name in names for passage in outside if re.search(rf"\b{name}\b", passage.text)]


def test_every_relation_that_leads_on_is_continued_in_both_splits():
    """Else a model would be asked about "the region of X" without having been shown the words."""
    follows: dict[tuple[str, str], int] = Counter()
    for first, relation in RELATIONS.items():
        for second, then in RELATIONS.items():
            if relation.object == then.subject:
                follows[first, split_of(f"{first}→{second}")] += 1
    assert sum(follows.values()) == 59
    leading = {first for first, relation in RELATIONS.items() if relation.means}
    assert set(follows) == {(first, split) for first in leading for split in ("run", "warmstart")}


def test_passages_are_short_plain_texts(world):
    for passage in world.passages.values():
        assert passage.text.startswith(passage.title)
        assert 2 <= passage.text.count(".") <= 4
        assert 20 <= len(passage.text.split()) <= 60


def test_a_passage_names_only_the_objects_of_its_own_facts(world):
    for passage in world.passages.values():
        own = {world.name(thing) for (subject, _), thing in world.facts.items() if subject == passage.id}
        named = {e.name for e in world.entities.values() if re.search(rf"\b{e.name}\b", passage.text)}
        assert named <= own | {passage.title}


def test_files_hold_the_world(world, tmp_path):
    write_world(world, tmp_path)
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    chains = [json.loads(line) for line in (tmp_path / "chains.jsonl").read_text().splitlines()]
    assert {document["id"]: document["text"] for document in corpus} == {
        passage.id: passage.text for passage in world.passages.values()
    }
    assert set(chains[0]) == {"id", "hop", "question", "answer", "doc_ids", "entities", "relations"}
    assert len(chains) == len(world.chains)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["chains.jsonl", "corpus.jsonl"]


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_world_has_every_hop(seed):
    world = generate_world(seed, passages=60, chains_per_hop=20)
    assert Counter(chain.hop for chain in world.chains) == dict.fromkeys(HOPS, 20)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"passages": 10}, "at least 60 passages, got 10"),
        ({"chain_share": 0.1}, "at least 60 passages, got 24"),
        ({"passages": 60, "chains_per_hop": 100_000}, "fewer chains or more passages"),
    ],
)
def test_a_world_too_small_is_refused(sizes, message):
    with pytest.raises(DataError, match=message):
        generate_world(0, **sizes)
