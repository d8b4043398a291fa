"""A run's trajectories added up by step: means and shares with their 95 % intervals.

Means have Student's interval and shares Wilson's. Both treat a step's trajectories as independent, although
they share weights and prompts, so they say nothing about another seed. Invalid rows are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from drzero.runs.report.trajectories import Trajectory
from drzero.stages.evaluate.intervals import mean_interval, wilson

Point = TypeVar("Point")
ATTEMPTS = ("none: too hard", "some", "all: too easy")
MOST_POINTS = 60  # of a curve; of more steps, each point pools some


@dataclass(frozen=True)
class Estimate:
    """A mean or a share of one step or some, with its interval if there are at least two values."""

    since: int
    step: int  # the last of them
    name: str
    mean: float
    low: float | None
    high: float | None
    n: int


class Tally:
    """Values of the trajectories that count, by step."""

    def __init__(self) -> None:
        self.trajectories = 0
        self.invalid = 0
        self.agents = 0
        self.faults = Counter[str]()
        """What failed in the episodes of an agent of one's own, by name."""
        self._values: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._flags: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
        self._solved: Counter[tuple[int, int, int]] = Counter()

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        self.trajectories += 1
        self.faults.update(fault["name"] for fault in trajectory.agent.get("faults") or ())
        self.agents += bool(trajectory.agent)
        if not trajectory.valid or trajectory.score is None:
            self.invalid += 1
            return
        step, hop, reward = trajectory.step or 0, trajectory.hop, trajectory.reward
        whole = {"reward": trajectory.score}  # wins over a part of this name
        for name, value in (whole | trajectory.parts | whole).items():
            self._values[name, step].append(value)
        if reward.get("k") is not None:
            self._solved[step, int(reward["k"]), int(reward["n"])] += 1
        for name, flag in _flags(trajectory, trajectory.score).items():
            self._flags[name, hop, step].append(flag)

    @property
    def names(self) -> list[str]:
        """The values that some trajectory has: `reward` and its parts."""
        return list(dict.fromkeys(name for name, _ in self._values))

    def means(self, name: str) -> list[Estimate]:
        """The mean of a value at each step, or over some."""
        pooled, spans = defaultdict[tuple[int, int], list[float]](list), self._spans()
        for (of, step), values in self._values.items():
            if of == name:
                pooled[spans[step]] += values
        return [
            Estimate(since, step, name, fmean(values), *mean_interval(values), len(values))
            for (since, step), values in sorted(pooled.items())
        ]

    def shares(self, name: str) -> list[Estimate]:
        """The share of trajectories with a flag at each step, or over some, by hop."""
        pooled, spans = defaultdict[tuple[int, tuple[int, int]], list[bool]](list), self._spans()
        for (of, hop, step), flags in self._flags.items():
            if of == name:
                pooled[hop, spans[step]] += flags
        return [
            Estimate(
                since, step, hops(hop), sum(flags) / len(flags), *wilson(sum(flags), len(flags)), len(flags)
            )
            for (hop, (since, step)), flags in sorted(pooled.items())
        ]

    def solved(self) -> list[dict[str, Any]]:
        """For each step, or some, the share of questions that no, some and all attempts answered right."""
        pooled, spans = defaultdict[tuple[int, int], Counter[str]](Counter), self._spans()
        for (step, k, n), count in self._solved.items():
            pooled[spans[step]][ATTEMPTS[(k > 0) + (k >= n > 0)]] += count
        return [
            {
                **{"since": since, "step": step, "attempts": attempts, "order": order},
                **{"questions": counts[attempts], "share": counts[attempts] / counts.total()},
            }
            for (since, step), counts in sorted(pooled.items())
            for order, attempts in enumerate(ATTEMPTS)
        ]

    def _spans(self) -> dict[int, tuple[int, int]]:
        """For each step, the first and the last step of its stretch."""
        steps = sorted({step for _, step in self._values})
        return {step: (some[0], some[-1]) for some in stretches(steps) for step in some}


def stretches(steps: Sequence[int]) -> list[Sequence[int]]:
    """The steps in at most MOST_POINTS stretches, in order."""
    size = -(-len(steps) // MOST_POINTS) or 1
    return [steps[first : first + size] for first in range(0, len(steps), size)]


def _flags(trajectory: Trajectory, score: float) -> dict[str, bool]:
    reward = trajectory.reward
    if "success" in reward:
        return {"solved": bool(reward["success"])}
    searched = {"searched": bool(trajectory.conversation.searches)}
    if "integrity" in reward:
        return searched | {"valid": bool(reward["integrity"])}
    return searched | {"right": score > 0}


def hops(hop: int) -> str:
    """A hop count for a legend."""
    return f"{hop} hop{'s' * (hop != 1)}" if hop else "no hops given"


def extremes(points: Sequence[Point], value: Callable[[Point], float], at_most: int = 240) -> list[Point]:
    """About `at_most` points: the smallest and largest of each stretch, in order."""
    if len(points) <= at_most:
        return list(points)
    size = -(-len(points) * 2 // at_most)
    kept = []
    for start in range(0, len(points), size):
        stretch = sorted(range(start, min(start + size, len(points))), key=lambda i: value(points[i]))
        kept += [points[place] for place in sorted({stretch[0], stretch[-1]})]
    return kept
