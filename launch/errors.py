"""The one error that the launcher shows as a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LaunchError(Exception):
    """What was asked for cannot be done; the message says what was wrong, where, and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` or nothing, to put into a message."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""
