"""An agent's episode as a tree of model calls: which one goes on from which, and where a row begins."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from drzero.ops.grouping import by_key
from drzero.ops.records import Record, Step, shape

_BEGAN = shape({"how": str}, call=Step, message=Step)
_CALL = shape({"extends": Step | None, "row": Step, "tokens": Step, "began": _BEGAN | None})
_FAULT = shape({"name": str, "text": str})
AGENT = shape(
    {"calls": list[_CALL], "places": dict[str, tuple[Step, Step]], "faults": list[_FAULT]},  # type: ignore[valid-type]
    **{"rewards": list[float], "weights": dict[str, float]},
)
"""What a dump has of an agent of one's own."""


@dataclass(frozen=True)
class CallMade:
    """One model call."""

    number: int  # from 1
    tokens: int  # sampled
    reward: float | None  # where the agent pays by the call


@dataclass(frozen=True)
class CallRow:
    """The calls that one row trains, and the rows that branch from them."""

    number: int  # from 1
    begins: str
    before: tuple[int, ...]  # the calls that it goes on from, which other rows train
    calls: tuple[CallMade, ...]
    tokens_before: int
    branches: "tuple[CallRow, ...]"

    @property
    def tokens(self) -> int:
        """How many sampled tokens it trains."""
        return sum(call.tokens for call in self.calls)


def checked(agent: Record) -> Record:
    """The record if it is a tree. Raises ValueError."""
    msgspec.convert(agent, AGENT)
    for number, call in enumerate(agent["calls"]):
        if call["extends"] is not None and call["extends"] >= number:
            raise ValueError(f"call {number} extends a later one")
    if len(agent.get("rewards") or agent["calls"]) != len(agent["calls"]):
        raise ValueError("it has other rewards than calls")
    return agent


def call_rows(agent: Record) -> tuple[CallRow, ...]:
    """The rows that begin a conversation, each with its branches."""
    calls: Sequence[Record] = agent.get("calls") or ()
    rewards = agent.get("rewards") or [None] * len(calls)
    own = by_key(range(len(calls)), lambda number: int(calls[number]["row"]))

    def made(row: int) -> CallRow:
        numbers = own[row]
        before = _path(calls, calls[numbers[0]]["extends"])
        return CallRow(
            row + 1,
            _begins(calls[numbers[0]], numbers[0]),
            tuple(number + 1 for number in before),
            tuple(CallMade(n + 1, calls[n]["tokens"], rewards[n]) for n in numbers),
            sum(calls[number]["tokens"] for number in before),
            tuple(made(other) for other in own if calls[own[other][0]]["extends"] in numbers),
        )

    return tuple(made(row) for row, numbers in own.items() if calls[numbers[0]]["extends"] is None)


def every_row(rows: Sequence[CallRow]) -> Iterator[CallRow]:
    """These rows and all that branch from them."""
    for row in rows:
        yield row
        yield from every_row(row.branches)


def _path(calls: Sequence[Record], last: int | None) -> list[int]:
    path: list[int] = []
    while last is not None:
        path.insert(0, last)
        last = calls[last]["extends"]
    return path


def _begins(call: Mapping[str, Any], number: int) -> str:
    if call["extends"] is not None:
        return f"branches from call {call['extends'] + 1}"
    began = call["began"]
    if began is None or "call" not in began:
        return "a conversation of its own" if number else "begins the episode"
    earlier = began["call"] + 1
    return {
        "edited": f"rewrites call {earlier} from message {began.get('message', 0) + 1} on",
        "again": f"asks call {earlier} again",
        "tools": f"has other tools than call {earlier}",
    }.get(began["how"], "a conversation of its own")
