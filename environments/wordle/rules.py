"""The rules: what colours a guess gets, and which words agree with the colours so far.

    colours("geese", "eerie")     # "XGYXG"
    agrees("eerie", "geese", "XGYXG")

A letter that a guess has more often than the secret is coloured as often as the secret has it: first where it
stands right, then from left to right.
"""

from collections import Counter
from collections.abc import Iterable

LENGTH = 5
GREEN, YELLOW, GREY = "G", "Y", "X"


def colours(guess: str, secret: str) -> str:
    """A colour for each letter: G in its place, Y in the word elsewhere, X not (or not once more) in the
    word.

    Raises ValueError for words of different lengths.
    """
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


def agrees(word: str, guess: str, seen: str) -> bool:
    """Whether a word could be the secret of which a guess got the colours `seen`."""
    return colours(guess, word) == seen


def candidates(words: Iterable[str], history: Iterable[tuple[str, str]]) -> list[str]:
    """The words that agree with every guess and its colours, in their order."""
    known = list(history)
    return [word for word in words if all(agrees(word, guess, seen) for guess, seen in known)]
