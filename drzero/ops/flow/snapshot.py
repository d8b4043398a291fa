"""Where the samples of a run are at one moment: queues and calls in flight, each a *flow point*.

    now = follow(before, taken)             # adds for how long each point has been still
    name = far_end(now.points, WAITS_ON, "buffer")

What a point needs before it can move are the points it *waits on*: a buffer waits on rollouts, a rollout on
searches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

WaitsOn = Mapping[str, tuple[str, ...]]
"""For each point, the points that it waits on."""

SUSPENDED_S = 30.0
"""More time between two polls than any poll takes: the machine was suspended meanwhile."""


@dataclass(frozen=True, kw_only=True)
class FlowPoint:
    """One place that samples or requests pass; counts are since the run was started."""

    depth: float | None = None
    """How many it holds now; None when unknown."""
    oldest_age_s: float | None = None
    """How long the oldest of them has been there."""
    came: float = 0.0
    """How many have come in (`in` in JSON)."""
    out: float = 0.0
    """How many have left it finished."""
    dropped: float = 0.0
    """How many have left it otherwise: stale, invalid, filtered."""
    errors: float = 0.0
    """How many failed in it."""
    capacity: float | None = None
    """How many it has room for; None without a bound."""
    work: float = 0.0
    """Grows with progress short of `out`, such as tokens."""
    role: Literal["work", "queue", "store"] = "work"
    """`work` ends by itself, a `queue` is emptied by the next point, a `store` only has a depth."""
    at: float = 0.0
    """When these counts were written, unix seconds: counts that were not rewritten prove no stillness."""
    still_s: float = 0.0
    """For how long it has held something while nothing moved (`follow`)."""
    usual_s: float = 0.0
    """The longest such time before this one (`follow`)."""

    @property
    def moved(self) -> tuple[float, float, float]:
        """The counts whose change means that the point has moved."""
        return self.out, self.work, self.dropped

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; zero and unknown extras are left out."""
        age = None if self.oldest_age_s is None else round(self.oldest_age_s, 2)
        record: dict[str, Any] = {"depth": self.depth, "oldest_age_s": age, "in": self.came}
        record |= {name: getattr(self, name) for name in ("out", "dropped", "errors")}
        extra = {"capacity": self.capacity, "work": self.work, "still_s": round(self.still_s, 1)}
        return record | {name: value for name, value in extra.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], at: float) -> Self:
        """Read the JSON form written at that time; unknown keys are ignored."""
        known = ("depth", "oldest_age_s", "out", "dropped", "errors", "capacity", "work", "role")
        return cls(came=data.get("in", 0.0), at=at, **{name: data[name] for name in known if name in data})


@dataclass(frozen=True)
class Waiting:
    """The trainer waits until a point holds enough."""

    point: str
    have: float
    want: float
    since_s: float
    """For how long it has waited."""

    @property
    def is_short(self) -> bool:
        """Whether there is not enough yet; if there is, the trainer itself is late."""
        return self.have < self.want

    def __str__(self) -> str:
        return f"{self.have:g} of {self.want:g} are there after {self.since_s:.0f} s"


@dataclass(frozen=True)
class Samples:
    """What has become of every sample that was requested."""

    asked: float = 0.0
    produced: float = 0.0
    """Finished by the rollout, whatever became of them."""
    accepted: float = 0.0
    """Trained on."""
    invalid: float = 0.0
    """Spoiled by a failed service; in no statistic."""
    failed: float = 0.0
    """Never became a sample, because their rollout raised."""
    stale: float = 0.0
    """Dropped because the policy was too many steps ahead."""
    filtered: float = 0.0
    """Dropped by choice: groups without signal, and surplus."""
    in_flight: float = 0.0
    settled: bool = True
    """False while drops are only partly known, so that the sum proves nothing."""

    @property
    def lost(self) -> float:
        """Requested, and neither finished nor dropped nor in flight."""
        ended = self.accepted + self.invalid + self.failed + self.stale + self.filtered
        return self.asked - ended - self.in_flight if self.settled else 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All flow points at one moment."""

    time: float
    points: Mapping[str, FlowPoint] = field(default_factory=dict)
    samples: Samples | None = None
    waiting: Waiting | None = None
    warmup: bool = False
    """Nothing has been trained on yet."""
    silent_s: float = 0.0
    """Since the trainer's process last wrote its counts."""
    ended: bool = False
    """The trainer has ended; what stands still now is expected to."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Also logged: step, mode, staleness."""


def follow(before: Snapshot | None, now: Snapshot, *, suspended: bool = False) -> Snapshot:
    """`now` with the stillness of each point, counted on from `before`; `suspended` time does not count."""
    if before is None:
        return now
    points = dict(now.points)
    for name in points.keys() & before.points.keys():
        earlier, point = before.points[name], points[name]
        if point.moved != earlier.moved:
            still, usual = 0.0, max(earlier.usual_s, earlier.still_s)
        else:
            elapsed = 0.0 if suspended else point.at - earlier.at
            # An empty point is not still: nothing in it could move.
            still, usual = earlier.still_s + elapsed if point.depth else 0.0, earlier.usual_s
        points[name] = replace(point, still_s=still, usual_s=usual)
    return replace(now, points=points)


def far_end(points: Mapping[str, FlowPoint], waits_on: WaitsOn, *starts: str) -> str | None:
    """The point that holds everything up: it holds something and waits on no point that does.

    Followed from `starts` along `waits_on`. Of several such points the farthest from its start is taken,
    of equally far ones the one whose oldest entry is oldest. None when nothing holds anything.
    """
    ends = [end for start in starts for end in _ends(points, waits_on, (start,))]
    if not ends:
        return None
    return max(ends, key=lambda path: (len(path), points[path[-1]].oldest_age_s or 0.0))[-1]


def _ends(points: Mapping[str, FlowPoint], waits_on: WaitsOn, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths from `path` to points that hold something and wait on none that does."""
    beyond = [
        end
        for other in waits_on.get(path[-1], ())
        if other not in path
        for end in _ends(points, waits_on, (*path, other))
    ]
    point = points.get(path[-1])
    return beyond or ([path] if point is not None and point.depth else [])


def undrained(now: Snapshot) -> dict[str, FlowPoint]:
    """Queues that hold something for the next point to take; one that the trainer waits on is not."""
    awaited = now.waiting.point if now.waiting and now.waiting.is_short else None
    return {
        name: point
        for name, point in now.points.items()
        if point.role == "queue" and point.depth and name != awaited
    }
