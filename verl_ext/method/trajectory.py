"""One conversation as plain data. Rewards read it instead of text, because corpus text may contain tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import msgspec


@dataclass(frozen=True)
class SearchCall:
    """One tool call with its parsed queries and the response."""

    raw: str  # the text between the tags, as generated
    queries: tuple[str, ...] | None  # None if the call is not valid
    response: str | None = None  # as shown to the model. None if the call was not answered
    failed: bool = False  # the service failed, which is not the model's mistake
    error: str | None = None  # why the call is not valid, or how the service failed

    @property
    def valid(self) -> bool:
        """Whether the model wrote a proper search call."""
        return self.queries is not None

    @property
    def answered(self) -> bool:
        """Whether a valid call got its passages."""
        return self.valid and self.response is not None and not self.failed


@dataclass(frozen=True)
class Turn:
    """One assistant turn, as generated, with its calls."""

    text: str
    calls: tuple[SearchCall, ...] = ()
    truncated: bool = False  # cut off by the token limit


@dataclass(frozen=True)
class Trajectory:
    """The assistant's turns of one conversation."""

    turns: tuple[Turn, ...] = ()

    @property
    def final_text(self) -> str:
        """The last turn's text, or ""."""
        return self.turns[-1].text if self.turns else ""

    @property
    def calls(self) -> tuple[SearchCall, ...]:
        """The calls of all turns."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def searches(self) -> tuple[SearchCall, ...]:
        """The valid calls that were answered."""
        return tuple(call for call in self.calls if call.answered)

    @property
    def failed_calls(self) -> tuple[SearchCall, ...]:
        """The calls that the search service failed to answer."""
        return tuple(call for call in self.calls if call.failed)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as in veRL's extra fields and the rollout dumps."""
        return cast(dict[str, Any], json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """From the JSON form. Raises KeyError or ValueError if a field is missing or of another type."""
        return msgspec.convert({"turns": data["turns"]}, cls)


class TokenRow(Protocol):
    """A row to train on: veRL's AgentLoopOutput or a played episode."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]


def token_drift(row: TokenRow, sampled: Sequence[tuple[list[int], list[int]]]) -> int:
    """1 if the row breaks token in, token out, else 0. `sampled` has each turn's input and sampled ids."""
    for (before_in, before_out), (after_in, _) in pairwise(sampled):
        known = before_in + before_out
        if after_in[: len(known)] != known:
            return 1
    trained = [i for i, kept in zip(row.response_ids, row.response_mask, strict=True) if kept]
    drawn = [token for _, ids in sampled for token in ids]
    starts_as_sampled = row.prompt_ids == sampled[0][0]
    return int(not starts_as_sampled or trained != drawn[: len(trained)] or not trained)
