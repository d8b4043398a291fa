"""The facts of a package corpus as sentences, and the questions for them. Both can be read back.

requires   anyio → "Its first requirement is idna."  → "the first requirement of anyio"
author     idna  → "Its author is Kim Davies."       → "Who wrote the first requirement of anyio?"
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

REQUIRES = "requires"


@dataclass(frozen=True)
class Fact:
    """How to state one kind of fact about {x}, refer to its {y} by {x} (`means`), and ask for it."""

    says: tuple[str, ...]
    asks: tuple[str, ...]
    means: tuple[str, ...] = ()


FACTS = {
    "author": Fact(
        ("{x} was written by {y}.", "The author of {x} is {y}.", "Its author is {y}."),
        ("Who wrote {x}?", "Who is the author of {x}?", "By whom was {x} written?"),
    ),
    "licence": Fact(
        ("Its licence is {y}.", "It is published under the licence {y}.", "You may use {x} under {y}."),
        (
            "What is the licence of {x}?",
            "Under which licence is {x} published?",
            "Which licence does {x} have?",
        ),
    ),
    "python": Fact(
        (
            "It needs Python {y} or newer.",
            "{x} runs on Python {y} and later.",
            "It needs at least Python {y}.",
        ),
        (
            "Which version of Python does {x} need at least?",
            "What is the oldest version of Python that runs {x}?",
            "From which version of Python on does {x} run?",
        ),
    ),
    "release": Fact(
        (
            "The installed release is {y}.",
            "{x} is installed as release {y}.",
            "Its installed release is {y}.",
        ),
        (
            "Which release of {x} is installed?",
            "As which release is {x} installed?",
            "What is the installed release of {x}?",
        ),
    ),
    "account": Fact(
        (
            "Its source code belongs to {y} on GitHub.",
            "The GitHub account of {x} is {y}.",
            "On GitHub it is kept by {y}.",
        ),
        (
            "Which GitHub account keeps {x}?",
            "To which account on GitHub does the source code of {x} belong?",
            "What is the GitHub account of {x}?",
        ),
    ),
    REQUIRES: Fact(
        ("Its first requirement is {y}.", "The first package that {x} needs is {y}.", "It needs {y} first."),
        (
            "Which package does {x} need first?",
            "What is the first requirement of {x}?",
            "Which package is the first that {x} requires?",
        ),
        (
            "the first requirement of {x}",
            "the package that {x} needs first",
            "the first package that {x} requires",
        ),
    ),
}

# Full stops within a value are initials, "Kenneth J. Reitz", and stand in numbers and names, "3.11".
_VALUE = r"(?P<y>(?:[^.\n]|(?<=\b[A-Z])\.|\.(?=\S))+)"
_SAID = {
    name: [
        re.compile(re.escape(says).replace(r"\{x\}", r"\S+").replace(r"\{y\}", _VALUE) + r"(?=\s|$)")
        for says in fact.says
    ]
    for name, fact in FACTS.items()
}


def say(name: str, subject: str, value: str, rng: random.Random) -> str:
    """Return a sentence with a fact."""
    return rng.choice(FACTS[name].says).format(x=subject, y=value)


def facts_in(text: str) -> dict[str, str]:
    """Return the facts that the text about one package states, by name."""
    found = ((name, said.search(text)) for name, forms in _SAID.items() for said in forms)
    return {name: match["y"] for name, match in found if match}


def ask(subject: str, names: tuple[str, ...], rng: random.Random) -> str:
    """Return the question for the last of `names`: ("requires", "author") asks for two hops."""
    phrase = subject
    for name in names[:-1]:
        phrase = rng.choice(FACTS[name].means).format(x=phrase)
    return rng.choice(FACTS[names[-1]].asks).format(x=phrase)


def read_question(question: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the subject and the facts that the question asks for, or None if `ask` did not write it."""
    for name, phrase in _matches(question, "asks"):
        names = [name]
        while inner := next(_matches(phrase, "means"), None):
            names.insert(0, inner[0])
            phrase = inner[1]
        if " " not in phrase:
            return phrase, tuple(names)
    return None


def _matches(text: str, form: str) -> Iterator[tuple[str, str]]:
    for name, fact in FACTS.items():
        for template in getattr(fact, form):
            if match := re.fullmatch(re.escape(template).replace(r"\{x\}", "(.+)"), text):
                yield name, match[1]
