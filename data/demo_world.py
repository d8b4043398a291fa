"""The demo world: an invented country with known facts, whose names no language model has seen.

    The Zolvan Lamp --written_by--> Krando Vilmesh --born_in--> Drosken --on_river--> Galmir

The splits share no invented word and no two relations in a row. Equal seed, split and sizes give equal bytes.
"""

import random
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

from data.errors import DataError
from data.hop_ratio import largest_remainder
from data.spread import spread
from data.world_language import COLOUR, FIRM_NOUNS, PRONOUNS, RELATIONS, WORK_NOUNS, invented_word, say
from drzero.ops.files import write_jsonl
from verl_ext.method.answers import contains_answer

Split = Literal["run", "warmstart"]
HOPS = (1, 2, 3, 4)
KIND_WEIGHTS = {"person": 90, "town": 40, "firm": 42, "work": 48, "river": 12, "region": 8}
"""Passages of each kind in a world of 240. Other sizes keep the ratio."""
MIN_PASSAGES = 60  # smaller worlds have too few rivers and regions for chains of four hops without a shortcut


@dataclass(frozen=True)
class Entity:
    """A named thing. Its passage has the same `id`."""

    id: str
    kind: str
    name: str


@dataclass(frozen=True)
class DemoPassage:
    """A corpus document: the facts of one entity."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Chain:
    """`entities[i] --relations[i]--> entities[i + 1]`. `doc_ids[i]` states fact i. The last is the answer."""

    id: str
    hop: int
    question: str
    answer: str
    doc_ids: tuple[str, ...]
    entities: tuple[str, ...]
    relations: tuple[str, ...]


@dataclass
class World:
    """Entities and passages by id, facts by (subject id, relation), and the chains drawn from them."""

    seed: int
    split: Split
    entities: dict[str, Entity] = field(default_factory=dict)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    passages: dict[str, DemoPassage] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)

    def name(self, thing: str) -> str:
        """Return the name of an entity id. A plain value is its own name."""
        return self.entities[thing].name if thing in self.entities else thing

    def of_kind(self, kind: str) -> list[str]:
        """Return the ids of all entities of a kind, in order of creation."""
        return [entity.id for entity in self.entities.values() if entity.kind == kind]


def split_of(word: str) -> Split:
    """Return the split that may use an invented word or a pair of relations ("written_by→born_in")."""
    return "warmstart" if sha256(word.lower().encode()).digest()[0] % 2 else "run"


def generate_world(
    seed: int,
    split: Split = "run",
    *,
    passages: int = 240,
    chains_per_hop: int = 100,
    chain_share: float = 1.0,
) -> World:
    """Build a world whose chains stay in a land of `chain_share` passages. Raises DataError for too few."""
    lands = [share * passages for share in (chain_share, 1 - chain_share) if share]
    if min(lands) < MIN_PASSAGES:
        raise DataError(f"a demo world needs at least {MIN_PASSAGES} passages, got {min(lands):g}")
    rng = random.Random(f"{split}/{seed}")
    world = World(seed, split)
    _name_entities(world, passages, rng)
    land: set[str] = set()
    for kind in KIND_WEIGHTS:
        entities = world.of_kind(kind)
        land.update(entities[: round(chain_share * len(entities))])
    for part in (land, world.entities.keys() - land):
        _draw_facts(world, part, rng)
    for entity in world.entities.values():
        world.passages[entity.id] = DemoPassage(entity.id, entity.name, _passage_text(world, entity, rng))
    for hop in HOPS:
        world.chains += _draw_chains(world, hop, chains_per_hop, land, rng)
    return world


def chain_leaks(chain: Chain, world: World) -> bool:
    """Whether the answer occurs in the question or in a passage before the last one."""
    early = [f"{world.passages[doc].title}\n{world.passages[doc].text}" for doc in chain.doc_ids[:-1]]
    return any(contains_answer(text, chain.answer) for text in (chain.question, *early))


def write_world(world: World, folder: Path) -> None:
    """Write `corpus.jsonl` (id, title, text) and `chains.jsonl` (the fields of `Chain`) into `folder`."""
    write_jsonl(folder / "corpus.jsonl", map(asdict, world.passages.values()))
    write_jsonl(folder / "chains.jsonl", map(asdict, world.chains))


def _name_entities(world: World, passages: int, rng: random.Random) -> None:
    used: set[str] = set()

    def word() -> str:
        while (candidate := invented_word(rng)) in used or split_of(candidate) != world.split:
            pass
        used.add(candidate)
        return candidate

    name_of: dict[str, Callable[[], str]] = {
        "person": lambda: f"{word()} {word()}",
        "firm": lambda: f"{word()} {rng.choice(FIRM_NOUNS)}",
        "work": lambda: f"The {word()} {rng.choice(WORK_NOUNS)}",
    }
    counts = largest_remainder(passages, list(KIND_WEIGHTS.values()))
    for kind, count in zip(KIND_WEIGHTS, counts, strict=True):
        for _ in range(count):
            name = name_of.get(kind, word)()
            entity_id = f"{kind}-{name.lower().replace(' ', '-')}"
            world.entities[entity_id] = Entity(entity_id, kind, name)


def _draw_facts(world: World, land: Set[str], rng: random.Random) -> None:

    def of_kind(kind: str) -> list[str]:
        return [entity for entity in world.of_kind(kind) if entity in land]

    facts, people = world.facts, of_kind("person")
    for relation, words in RELATIONS.items():
        subjects = of_kind(words.subject)
        if relation == "married_to":
            married = rng.sample(people, 2 * (len(people) // 3))
            for one, other in zip(married[::2], married[1::2], strict=True):
                facts[one, relation], facts[other, relation] = other, one
        elif relation == "taught_by":
            # A teacher precedes the pupil in the list, so that teaching has no circles.
            for i, pupil in enumerate(people[1:], start=1):
                if rng.random() < 0.6:
                    facts[pupil, relation] = rng.choice(people[:i])
        elif relation == "capital":
            for region in subjects:
                towns = [town for town in of_kind("town") if facts[town, "in_region"] == region]
                facts[region, relation] = rng.choice(towns)
        else:
            objects = of_kind(words.object) if isinstance(words.object, str) else list(words.object)
            deck: list[str] = []  # every object is used equally often
            for subject in subjects:
                deck = deck or rng.sample(objects, len(objects))
                facts[subject, relation] = deck.pop(0)


def _passage_text(world: World, entity: Entity, rng: random.Random) -> str:
    relations = [name for name in RELATIONS if (entity.id, name) in world.facts]
    relations[1:] = rng.sample(relations[1:], len(relations) - 1)
    clauses = [say(rng, name, world.name(world.facts[entity.id, name])) for name in relations]
    sentences = [" and ".join(clauses[i : i + 2]) for i in range(0, len(clauses), 2)]
    subjects = [entity.name] + [rng.choice(PRONOUNS[entity.kind])] * (len(sentences) - 1)
    text = " ".join(f"{subject} {clause}." for subject, clause in zip(subjects, sentences, strict=True))
    return f"{text} {rng.choice(COLOUR[entity.kind])}" if len(clauses) < 6 else text


def _draw_chains(world: World, hop: int, count: int, land: Set[str], rng: random.Random) -> list[Chain]:
    chains: list[Chain] = []
    walks = [walk for start in world.entities if start in land for walk in walks_of(world, start, hop)]
    rng.shuffle(walks)
    # A walk from every first document, then a second from each, and so on.
    for walk in spread(walks, lambda walk: walk[0][0]):
        chain = chain_of(world, walk, f"{world.split}-{hop}-{len(chains):04d}", rng)
        if len(chains) == count:
            break
        if not chain_leaks(chain, world):
            chains.append(chain)
    if len(chains) < count:
        raise DataError(
            f"{len(land)} passages have {len(chains)} chains of {hop} hops without a shortcut, not {count}: "
            "ask for fewer chains or more passages"
        )
    return chains


# (things, relations): things[i] --relations[i]--> things[i + 1]
Walk = tuple[tuple[str, ...], tuple[str, ...]]


def walks_of(world: World, start: str, hop: int) -> Iterator[Walk]:
    """Every walk of `hop` facts from an entity that visits nothing twice and fits the world's split."""

    def walk(things: tuple[str, ...], relations: tuple[str, ...]) -> Iterator[Walk]:
        if len(relations) == hop:
            yield things, relations
            return
        for relation in RELATIONS:
            thing = world.facts.get((things[-1], relation))
            pair = "→".join((*relations[-1:], relation))
            if thing and thing not in things and (not relations or split_of(pair) == world.split):
                yield from walk((*things, thing), (*relations, relation))

    yield from walk((start,), ())


def chain_of(world: World, walk: Walk, chain_id: str, rng: random.Random) -> Chain:
    """The chain of a walk, with a question in random phrasings."""
    things, relations = walk
    names = tuple(map(world.name, things))
    question = compose_question(names[0], relations, rng)
    return Chain(chain_id, len(relations), question, names[-1], things[:-1], names, relations)


def compose_question(start: str, relations: tuple[str, ...], rng: random.Random) -> str:
    """Return the question for the end of a walk from the name `start`, with random phrasings."""
    phrase = start
    for relation in relations[:-1]:
        phrase = rng.choice(RELATIONS[relation].means).format(x=phrase)
    return rng.choice(RELATIONS[relations[-1]].asks).format(x=phrase)
