"""The facts of a package corpus as sentences, and the questions for them. Both can be read back.

    requires   anyio → "Its first requirement is idna."  → "the first requirement of anyio"
    author     idna  → "Its author is Kim Davies."       → "Who wrote the first requirement of anyio?"

The words are in package_language.yaml.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

REQUIRES = "requires"
FACTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""By name of the fact, its `says`, `asks` and `means`."""
# Full stops within a value are initials, "Kenneth J. Reitz", and stand in numbers and names, "3.11".
_VALUE = r"(?P<y>(?:[^.\n]|(?<=\b[A-Z])\.|\.(?=\S))+)"
_SAID = {
    name: [
        re.compile(re.escape(says).replace(r"\{x\}", r"\S+").replace(r"\{y\}", _VALUE) + r"(?=\s|$)")
        for says in fact["says"]
    ]
    for name, fact in FACTS.items()
}


def say(name: str, subject: str, value: str, rng: random.Random) -> str:
    """Return a sentence with a fact."""
    return rng.choice(FACTS[name]["says"]).format(x=subject, y=value)


def facts_in(text: str) -> dict[str, str]:
    """Return the facts that the text about one package states, by name."""
    found = ((name, said.search(text)) for name, forms in _SAID.items() for said in forms)
    return {name: match["y"] for name, match in found if match}


def ask(subject: str, names: tuple[str, ...], rng: random.Random) -> str:
    """Return the question for the last of `names`: ("requires", "author") asks for two hops."""
    phrase = subject
    for name in names[:-1]:
        phrase = rng.choice(FACTS[name]["means"]).format(x=phrase)
    return rng.choice(FACTS[names[-1]]["asks"]).format(x=phrase)


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
        for template in fact.get(form, ()):
            if match := re.fullmatch(re.escape(template).replace(r"\{x\}", "(.+)"), text):
                yield name, match[1]
