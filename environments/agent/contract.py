"""An agent of your own: code that talks to a model through any client, and returns a reward.

    async def answer(task, endpoint):                     # my_agent.py:answer
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            …
        return 1.0                                        # or rewards by name, or one for each model call

The same as a class is `async def run(self, data, **extra_kwargs)`, with the endpoint's fields by name. As a
command it finds them in its environment (`Endpoint.environ`), reads the task as JSON from its standard input,
and prints the reward as its last line.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from reprlib import repr as short_repr  # whatever a value's own repr does
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """Where an agent finds its model. Every OpenAI or Anthropic client takes these."""

    base_url: str  # ends in /v1
    api_key: str
    model: str = "policy"
    search_url: str | None = None  # the run's search service, for an agent with `search: true`

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which clients find a model without being told."""
        anthropic = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": anthropic,
            "ANTHROPIC_API_KEY": self.api_key,
            "MODEL": self.model,
        } | ({"SEARCH_URL": self.search_url} if self.search_url else {})


@dataclass(frozen=True)
class Agent:
    """An agent that was found."""

    name: str
    play: Callable[[Any, Endpoint], Awaitable[Any]]
    """Play one task. Returns a reward, rewards by name, or a list with one for each model call."""
    file: Path | None = None  # of its code. A command has none


@dataclass(frozen=True)
class RewardRule:
    """A reward is a finite number, within the range if there is one."""

    low: float = -math.inf
    high: float = math.inf

    def fault(self, returned: Any) -> str | None:
        """The fault of a run's return value, if any."""
        if isinstance(returned, Mapping):
            named = [(f"the reward {short_repr(name):.40}", value) for name, value in returned.items()]
            if wrong := next((name for name in returned if not isinstance(name, str)), None):
                return f"a reward's name is {short_repr(wrong):.40}, not text"
        elif isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray):
            named = [(f"the reward of call {n}", value) for n, value in enumerate(returned, start=1)]
        else:
            return self._fault_of(returned, "the reward")
        if not named:
            return f"the rewards are an empty {'dict' if isinstance(returned, Mapping) else 'list'}"
        return next((fault for what, value in named if (fault := self._fault_of(value, what))), None)

    def _fault_of(self, value: Any, what: str) -> str | None:
        # A trainer would read True as 1.0, whatever was meant.
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"{what} is {short_repr(value):.40} ({type(value).__name__}), not a number"
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return f"{what} is {number}"
        if not self.low <= number <= self.high:
            return f"{what} is outside {self.low:g} to {self.high:g}"
        return None


def total(returned: Any, weights: Mapping[str, float] | None = None) -> float:
    """A reward as one number: the sum of a list, a dict's parts by weight, its `reward`, or its mean.

    Parts that are finite may add up to infinity or NaN.
    """
    if isinstance(returned, Mapping):
        if weights:
            return float(sum(weights.get(name, 0.0) * float(value) for name, value in returned.items()))
        return float(returned.get("reward", sum(map(float, returned.values())) / len(returned)))
    if isinstance(returned, Sequence):
        return float(sum(map(float, returned)))
    return float(returned)
