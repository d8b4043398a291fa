"""The words, their split, and which of them count as a guess; `words/README.md` has origin and licence."""

import hashlib
from functools import cache
from importlib.resources import files

EVAL_SHARE = 0.2
"""Of the answers, those held out."""


@cache
def answers() -> tuple[str, ...]:
    """The words that may be the secret."""
    return _read("answers.txt")


@cache
def guesses() -> frozenset[str]:
    """The words that may be guessed, the answers among them."""
    return frozenset(_read("guesses.txt"))


def is_held_out(word: str) -> bool:
    """Whether an answer is of the evaluation; by its hash, so that longer lists move no word to the other
    side."""
    first = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4])
    return first < EVAL_SHARE * 2**32


def _read(name: str) -> tuple[str, ...]:
    text = files(__package__).joinpath("words", name).read_text(encoding="ascii")
    return tuple(text.split())
