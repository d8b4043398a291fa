"""Takes turns among kinds: the first of each, then the second of each, and so on."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def spread(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[Item]:
    """Return all items in that order. Within a turn they keep theirs."""
    times: Counter[Hashable] = Counter()
    turns: list[tuple[int, Item]] = []
    for item in items:
        turns.append((times[kind(item)], item))
        times[kind(item)] += 1
    return [item for _, item in sorted(turns, key=lambda turn: turn[0])]
