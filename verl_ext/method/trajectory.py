"""What happened in one conversation: assistant turns with their search calls, as plain immutable data.

Rewards read these structures and never a flat string, because corpus text may itself contain tags. In JSON
form trajectories travel through veRL's extra fields and the rollout dumps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast


@dataclass(frozen=True)
class SearchCall:
    """One tool call: what the model wrote, its parsed queries, and the response it was shown."""

    raw: str
    """The text between the tool-call tags, as generated."""
    queries: tuple[str, ...] | None
    """The queries, or None when the call is not a valid search call."""
    response: str | None = None
    """The text as shown to the model, or None when the call was never answered."""
    failed: bool = False
    """The service failed, which is not the model's mistake."""
    error: str | None = None
    """Why the call is not valid, or how the service failed."""

    @property
    def valid(self) -> bool:
        """Whether the model wrote a proper search call."""
        return self.queries is not None

    @property
    def answered(self) -> bool:
        """Whether a valid call got its passages."""
        return self.valid and self.response is not None and not self.failed

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchCall:
        """Rebuild a call from its JSON form."""
        queries = None if data["queries"] is None else tuple(data["queries"])
        return cls(data["raw"], queries, data["response"], data["failed"], data["error"])


@dataclass(frozen=True)
class Turn:
    """One assistant turn: its text as generated and the calls made in it."""

    text: str
    calls: tuple[SearchCall, ...] = ()
    truncated: bool = False
    """The turn reached its token limit before the model ended it."""


@dataclass(frozen=True)
class Trajectory:
    """The assistant's side of one conversation, in order."""

    turns: tuple[Turn, ...] = ()

    @property
    def final_text(self) -> str:
        """The last turn's text, empty when there was no turn."""
        return self.turns[-1].text if self.turns else ""

    @property
    def calls(self) -> tuple[SearchCall, ...]:
        """Every call of every turn."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def searches(self) -> tuple[SearchCall, ...]:
        """The valid calls that were answered."""
        return tuple(call for call in self.calls if call.answered)

    @property
    def failed_calls(self) -> tuple[SearchCall, ...]:
        """The calls the search service failed to answer."""
        return tuple(call for call in self.calls if call.failed)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: nested dicts, lists, strings and booleans only."""
        return cast(dict[str, Any], json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """Rebuild a trajectory from its JSON form; raises KeyError when a field is missing."""
        turns = []
        for turn in data["turns"]:
            calls = tuple(SearchCall.from_dict(call) for call in turn["calls"])
            turns.append(Turn(turn["text"], calls, turn["truncated"]))
        return cls(tuple(turns))
