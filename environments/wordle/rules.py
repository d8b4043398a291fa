"""The colours of a guess, the words that agree with them, and the word lists (words/README.md)."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

LENGTH = 5
GREEN, YELLOW, GREY = "G", "Y", "X"
EVAL_SHARE = 0.2  # the share of answers held out


def colours(guess: str, secret: str) -> str:
    """A colour for each letter, as often as the secret has it, greens first. Raises ValueError."""
    pairs = list(zip(guess, secret, strict=True))
    left = Counter(there for here, there in pairs if here != there)
    found = []
    for here, there in pairs:
        if here == there:
            found.append(GREEN)
        elif left[here]:
            left[here] -= 1
            found.append(YELLOW)
        else:
            found.append(GREY)
    return "".join(found)


def candidates(words: Iterable[str], history: Iterable[tuple[str, str]]) -> list[str]:
    """The words that agree with every guess and its colours, in their order."""
    known = list(history)
    return [word for word in words if all(colours(guess, word) == seen for guess, seen in known)]


@cache
def answers() -> tuple[str, ...]:
    """The possible secrets."""
    return _read("answers.txt")


@cache
def guesses() -> frozenset[str]:
    """The allowed guesses, the answers among them."""
    return frozenset(_read("guesses.txt"))


def is_held_out(word: str) -> bool:
    """Whether an answer is for evaluation. By its hash, so that a longer list moves no word."""
    first = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4])
    return first < EVAL_SHARE * 2**32


def _read(name: str) -> tuple[str, ...]:
    return tuple(files(__package__).joinpath("words", name).read_text(encoding="ascii").split())
