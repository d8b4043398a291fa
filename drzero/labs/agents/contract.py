"""An agent: a class with `async def run(self, data, **extra_kwargs)`, and what it may return.

    class MyAgent:
        async def run(self, data, **extra_kwargs):
            base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
            …
            return 1.0                                # or {"reward": 1.0, "format": 0.5}

It gets `base_url` and `api_key` by keyword, and finds them in OPENAI_BASE_URL and OPENAI_API_KEY as well.
Each run has an object of its own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol


class Agent(Protocol):
    """What is run."""

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        """Play one item; returns a reward, or rewards by name."""
        ...


@dataclass(frozen=True)
class AgentClass:
    """An agent that has been found."""

    name: str
    make: Callable[[], Agent]
    """A new one, for one run."""
    folder: Path | None = None
    """Where its code is, for telling its lines from those of libraries."""


@dataclass(frozen=True)
class RewardRule:
    """What a reward may be: a finite number, numpy's included, within a range if one is given."""

    low: float = -math.inf
    high: float = math.inf

    def fault(self, returned: Any) -> str | None:
        """What is wrong with what a run returned; None if nothing is."""
        if not isinstance(returned, Mapping):
            return self._fault_of(returned, "the reward")
        if not returned:
            return "the rewards are an empty dict"
        for name, value in returned.items():
            if not isinstance(name, str):
                return f"a name of a reward is {name!r:.40}, not text"
            if fault := self._fault_of(value, f"the reward {name!r}"):
                return fault
        return None

    def _fault_of(self, value: Any, what: str) -> str | None:
        # True is an int to Python: a trainer would take it for 1.0, whatever was meant.
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"{what} is {value!r:.40} ({type(value).__name__}), not a number"
        if not math.isfinite(value):
            return f"{what} is {value}"
        if not self.low <= float(value) <= self.high:
            return f"{what} is outside of {self.low:g} to {self.high:g}"
        return None


def total(returned: float | Mapping[str, float]) -> float:
    """A run's reward as one number: of a dict its `reward`, else the mean."""
    if not isinstance(returned, Mapping):
        return float(returned)
    return float(returned.get("reward", sum(returned.values()) / len(returned)))
