"""The words of the demo world (world_language.yaml): names, and relations as clause, noun phrase, question.

`means`, such as "the birthplace of {x}", is empty for a plain value, which ends a walk.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import yaml

_WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

FIRM_NOUNS = tuple(_WORDS["firm_nouns"].split())
WORK_NOUNS = tuple(_WORDS["work_nouns"].split())
PRONOUNS = {kind: tuple(words) for kind, words in _WORDS["pronouns"].items()}
COLOUR = {kind: tuple(sentences) for kind, sentences in _WORDS["colour"].items()}
_VALUES = {
    **{name: tuple(words.split()) for name, words in _WORDS["values"].items()},
    "year": tuple(str(year) for year in range(1640, 1960)),
    "length": tuple(f"{length} km" for length in range(60, 800, 7)),
}


@dataclass(frozen=True)
class Relation:
    """One functional relation: kind of its subject, kind or plain values of its object, phrasings."""

    subject: str
    object: str | tuple[str, ...]
    says: tuple[str, ...]
    means: tuple[str, ...]
    asks: tuple[str, ...]


def _relation(entry: dict[str, str | list[str]]) -> Relation:
    subject, thing = str(entry["of"]).split()
    says, means, asks = (tuple(entry.get(part, ())) for part in ("says", "means", "asks"))
    return Relation(subject, _VALUES.get(thing, thing), says, means, asks)


RELATIONS = {name: _relation(entry) for name, entry in _WORDS["relations"].items()}


def invented_word(rng: random.Random) -> str:
    """Return a capitalised word of two syllables such as "Zolvan", out of about 160,000."""
    return "".join(rng.choice(part.split()) for part in _WORDS["syllables"]).capitalize()


def say(rng: random.Random, relation: str, thing: str) -> str:
    """Return a clause without a subject, such as "was born in Drosken"."""
    return rng.choice(RELATIONS[relation].says).format(y=thing)
