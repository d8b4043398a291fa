"""The launcher's error, and the nearest known word for its messages."""

import difflib
from collections.abc import Iterable

from drzero.ops.errors import UserError


class LaunchError(UserError):
    """A launch is not possible, or has failed; the message says what is wrong, where, and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` or nothing, to put into a message."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""
