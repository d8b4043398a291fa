"""Where the samples of a run are at one moment: queues and calls in flight, each a *flow point*.

A point *waits on* the points it needs to move: a buffer waits on rollouts, a rollout on searches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

WaitsOn = Mapping[str, tuple[str, ...]]  # for each point, the points it waits on

SUSPENDED_S = 30.0  # a longer time between two polls means that the machine was suspended


@dataclass(frozen=True, kw_only=True)
class FlowPoint:
    """A place that samples or requests pass. Counts are since the start of the run."""

    depth: float | None = None  # how many it holds now, if known
    oldest_age_s: float | None = None  # how long its oldest entry has been there
    came: float = 0.0  # entered (`in` in JSON)
    out: float = 0.0  # left it finished
    dropped: float = 0.0  # left it otherwise: stale, invalid, filtered
    errors: float = 0.0  # failed in it
    capacity: float | None = None  # its room, or None without a bound
    work: float = 0.0  # grows with progress short of `out`, such as tokens
    role: Literal["work", "queue", "store"] = "work"
    """`work` ends by itself, the next point empties a `queue`, a `store` only has a depth."""
    at: float = 0.0  # when these counts were written (unix seconds): stillness needs rewritten ones
    still_s: float = 0.0  # how long it has held something while nothing moved (`follow`)
    usual_s: float = 0.0  # the longest such time before this one (`follow`)

    @property
    def moved(self) -> tuple[float, float, float]:
        """The counts whose change means that the point moved."""
        return self.out, self.work, self.dropped

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without zero and unknown extras."""
        age = None if self.oldest_age_s is None else round(self.oldest_age_s, 2)
        record: dict[str, Any] = {"depth": self.depth, "oldest_age_s": age, "in": self.came}
        record |= {name: getattr(self, name) for name in ("out", "dropped", "errors")}
        extra = {"capacity": self.capacity, "work": self.work, "still_s": round(self.still_s, 1)}
        return record | {name: value for name, value in extra.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], at: float) -> Self:
        """Read the JSON form written at that time, ignoring unknown keys."""
        known = ("depth", "oldest_age_s", "out", "dropped", "errors", "capacity", "work", "role")
        return cls(came=data.get("in", 0.0), at=at, **{name: data[name] for name in known if name in data})


@dataclass(frozen=True)
class Waiting:
    """The trainer waits until a point holds enough."""

    point: str
    have: float
    want: float
    since_s: float
    filtered: float = 0.0  # dropped meanwhile, because they scored alike

    def has_dropped(self, batches: int) -> bool:
        """Whether it still waits after so many batches (of six groups at least) that scored alike."""
        return self.is_short and self.filtered >= batches * max(self.want, 6)

    @property
    def is_short(self) -> bool:
        """Whether there is not enough yet. If there is, the trainer itself is late."""
        return self.have < self.want

    def __str__(self) -> str:
        alike = f", and {self.filtered:g} scored alike" if self.filtered else ""
        return f"{self.have:g} of {self.want:g} are there after {self.since_s:.0f} s{alike}"


@dataclass(frozen=True)
class Samples:
    """What happened to every requested sample."""

    asked: float = 0.0
    produced: float = 0.0  # finished by the rollout, whatever happened next
    accepted: float = 0.0  # trained on
    invalid: float = 0.0  # spoiled by a failed service; in no statistic
    failed: float = 0.0  # their rollout raised
    stale: float = 0.0  # dropped because the policy was too many steps ahead
    filtered: float = 0.0  # dropped on purpose: groups without signal, and surplus
    in_flight: float = 0.0
    settled: bool = True  # False while drops are only partly known, so that the sum proves nothing

    @property
    def lost(self) -> float:
        """Requested, but neither finished nor dropped nor in flight."""
        ended = self.accepted + self.invalid + self.failed + self.stale + self.filtered
        return self.asked - ended - self.in_flight if self.settled else 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All flow points at one moment."""

    time: float
    points: Mapping[str, FlowPoint] = field(default_factory=dict)
    samples: Samples | None = None
    waiting: Waiting | None = None
    warmup: bool = False  # nothing has been trained on yet
    silent_s: float = 0.0  # since the trainer's process last wrote its counts
    ended: bool = False  # the trainer has ended, so points may stand still
    about: Mapping[str, Any] = field(default_factory=dict)  # more to log: step, mode, staleness


def follow(before: Snapshot | None, now: Snapshot, *, suspended: bool = False) -> Snapshot:
    """Return `now` with each point's stillness, continued from `before`. Suspended time does not count."""
    if before is None:
        return now
    points = dict(now.points)
    for name in points.keys() & before.points.keys():
        earlier, point = before.points[name], points[name]
        if point.moved != earlier.moved:
            still, usual = 0.0, max(earlier.usual_s, earlier.still_s)
        else:
            elapsed = 0.0 if suspended else point.at - earlier.at
            # An empty point is not still, because nothing in it could move.
            still, usual = earlier.still_s + elapsed if point.depth else 0.0, earlier.usual_s
        points[name] = replace(point, still_s=still, usual_s=usual)
    return replace(now, points=points)


def far_end(points: Mapping[str, FlowPoint], waits_on: WaitsOn, *starts: str) -> str | None:
    """Return the farthest point behind `starts` that holds something, on a tie by its oldest entry."""
    ends = [end for start in starts for end in _ends(points, waits_on, (start,))]
    if not ends:
        return None
    return max(ends, key=lambda path: (len(path), points[path[-1]].oldest_age_s or 0.0))[-1]


def _ends(points: Mapping[str, FlowPoint], waits_on: WaitsOn, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths from `path` to points that hold something while the points they wait on hold nothing."""
    beyond = [
        end
        for other in waits_on.get(path[-1], ())
        if other not in path
        for end in _ends(points, waits_on, (*path, other))
    ]
    point = points.get(path[-1])
    return beyond or ([path] if point is not None and point.depth else [])


def undrained(now: Snapshot) -> dict[str, FlowPoint]:
    """Return the queues that hold something for the next point, except one that the trainer waits on."""
    awaited = now.waiting.point if now.waiting and now.waiting.is_short else None
    return {
        name: point
        for name, point in now.points.items()
        if point.role == "queue" and point.depth and name != awaited
    }
