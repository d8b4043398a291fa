"""An agent is a class with `async def run(self, data, **extra_kwargs)` that returns a reward.

    class MyAgent:
        async def run(self, data, **extra_kwargs):
            return 1.0                                # or {"reward": 1.0, "format": 0.5}

Each run gets a new object. `extra_kwargs` has `base_url` and `api_key`, like OPENAI_BASE_URL, OPENAI_API_KEY.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AgentClass:
    """An agent that was found."""

    name: str
    make: Callable[[], Any]  # a new object of the user's class
    folder: Path | None = None  # the folder of its code, to tell its lines from library lines


@dataclass(frozen=True)
class RewardRule:
    """A reward is a finite number, within the range if there is one."""

    low: float = -math.inf
    high: float = math.inf

    def fault(self, returned: Any) -> str | None:
        """The fault of a run's return value, if any."""
        if not isinstance(returned, Mapping):
            return self._fault_of(returned, "the reward")
        if not returned:
            return "the rewards are an empty dict"
        for name, value in returned.items():
            if not isinstance(name, str):
                return f"a reward's name is {name!r:.40}, not text"
            if fault := self._fault_of(value, f"the reward {name!r}"):
                return fault
        return None

    def _fault_of(self, value: Any, what: str) -> str | None:
        # A trainer would read True as 1.0, whatever was meant.
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"{what} is {value!r:.40} ({type(value).__name__}), not a number"
        if not math.isfinite(value):
            return f"{what} is {value}"
        if not self.low <= float(value) <= self.high:
            return f"{what} is outside {self.low:g} to {self.high:g}"
        return None


def total(returned: float | Mapping[str, float]) -> float:
    """A run's reward as one number. For a dict its `reward`, else the mean."""
    if not isinstance(returned, Mapping):
        return float(returned)
    return float(returned.get("reward", sum(returned.values()) / len(returned)))
