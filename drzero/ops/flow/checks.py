"""Faults in a flow of samples that still moves, from two consecutive snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass

from drzero.ops.flow.snapshot import Snapshot, WaitsOn

ALIKE_ACTION = (
    "All attempts at a task fail, or all succeed: take easier (harder) tasks or another model, or train on "
    "such groups too with algorithm.filter_groups.enable=false"
)


@dataclass(frozen=True)
class Symptom:
    """Which check found what at which point, with figures, and what to do."""

    check: str
    point: str
    text: str
    action: str

    def __str__(self) -> str:
        return f"{self.check}, {self.point}: {self.text}. {self.action}"


def find_symptoms(before: Snapshot, now: Snapshot, waits_on: WaitsOn, floor_s: float) -> list[Symptom]:
    """Return the symptoms between two snapshots. A first batch may take `floor_s` seconds."""
    if now.ended:
        return []
    symptoms = list(_at_points(before, now, floor_s))
    if (waiting := now.waiting) and waiting.has_dropped(1) and waiting.filtered >= 9 * waiting.have:
        symptoms.append(Symptom("groups score alike", waiting.point, f"{waiting}", ALIKE_ACTION))
    # Counts are not taken at one instant, so a sample is lost only if both snapshots miss it.
    samples, lost = now.samples, 0.0
    if samples and before.samples:
        lost = min(before.samples.lost, samples.lost)
    if samples and lost > 0:
        text = (
            f"{samples.asked:.0f} asked for, but accepted {samples.accepted:.0f} + invalid "
            f"{samples.invalid:.0f} + failed {samples.failed:.0f} + stale {samples.stale:.0f} + filtered "
            f"{samples.filtered:.0f} + in flight {samples.in_flight:.0f} is {lost:.0f} fewer"
        )
        known = (
            f"between {feeders[0]} and {name}" for name, feeders in waits_on.items() if name in now.points
        )
        action = "Look for a worker that died between them"
        symptoms.append(Symptom("samples lost", next(known, "unknown"), text, action))
    return symptoms


def _at_points(before: Snapshot, now: Snapshot, floor_s: float) -> Iterator[Symptom]:
    drops, waiting = _grown(before, now, "dropped"), now.waiting
    is_late = now.warmup and waiting and waiting.is_short and waiting.since_s >= floor_s
    if drops and is_late and waiting and before.waiting and waiting.have <= before.waiting.have:
        # The first batch does not fill up because arrivals are dropped.
        name, count = max(drops.items(), key=lambda item: item[1])
        text = f"{waiting}; {count:.0f} more were dropped since the last snapshot"
        yield Symptom("warm-up stalled", name, text, "Find out why this point drops what it is given")
    for name, point in now.points.items():
        # A bounded point that is almost full and does not empty will refuse or drop the next arrivals.
        earlier = before.points.get(name)
        if not point.capacity or point.depth is None or earlier is None or earlier.depth is None:
            continue
        if point.depth >= 0.8 * point.capacity and point.depth >= earlier.depth:
            verb = "wait for" if point.depth > point.capacity else "fill"
            text = f"{point.depth:g} {verb} {point.capacity:g} places, {earlier.depth:g} before"
            yield Symptom("queue near capacity", name, text, "Speed up the next point, or give it more room")
    for name, count in _grown(before, now, "errors").items():
        text = f"{count:.0f} more have failed, {now.points[name].errors:.0f} in all"
        yield Symptom("errors", name, text, "The log of its component has the exception")
    for name, dropped in drops.items():
        left = dropped + max(now.points[name].out - before.points[name].out, 0.0)
        if dropped > 0.2 * left:
            text = f"{dropped:.0f} of the {left:.0f} that left it were dropped"
            action = "If they are stale, request fewer ahead. If they are invalid, check the services"
            yield Symptom("samples dropped", name, text, action)


def _grown(before: Snapshot, now: Snapshot, count: str) -> dict[str, float]:
    grown = {}
    for name, point in now.points.items():
        earlier = before.points.get(name)
        by = getattr(point, count) - getattr(earlier, count) if earlier else 0.0
        if by > 0:
            grown[name] = by
    return grown
