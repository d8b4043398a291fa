"""The table of the asynchronous debugging guide as checks: each names a flow point."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from drzero.ops.flow.checks import find_symptoms
from drzero.ops.flow.snapshot import FlowPoint, Samples, Snapshot, Waiting, far_end, follow
from drzero.ops.watchdog.movement import Movement, Patience, Signs, flow_stall

WAITS_ON = {
    "buffer": ("prompts",),
    "prompts": ("rollout",),
    "rollout": ("generation", "search"),
    "search": ("retrieval queue",),
}
PATIENCE = Patience(cold_start_s=300, floor_s=60, factor=2)


def point(depth: float = 0, out: float = 10, **fields: Any) -> FlowPoint:
    return FlowPoint(depth=depth, out=out, came=out + depth, **fields)


def snapshot(at: float, wanted: Waiting | None = None, **fields: Any) -> Snapshot:
    """A run in which everything is empty, but for the points that are given."""
    names = [name for name in fields if name not in Snapshot.__dataclass_fields__]
    usual = {"prompts": point(), "buffer": point(role="queue"), "rollout": point(), "search": point()}
    points = usual | {name: fields.pop(name) for name in names}
    timed = {name.replace("_", " "): replace(point, at=at) for name, point in points.items()}
    return Snapshot(time=at, points=timed, waiting=wanted, **fields)


def waits(since_s: float = 100, have: float = 3, want: float = 8) -> Waiting:
    return Waiting("buffer", have, want, since_s)


def found_in(*snapshots: Snapshot, phase: str = "", phase_limit_s: float = 0.0) -> dict[tuple[str, str], str]:
    """The stall, then the symptoms, in the last of consecutive snapshots: the text by kind and place."""
    before = snapshots[0]
    found: dict[tuple[str, str], str] = {}
    for taken in snapshots[1:]:
        now = follow(before, taken)
        stall = flow_stall(now, WAITS_ON, PATIENCE, phase, phase_limit_s)
        found = {(stall.kind, stall.where): stall.text} if stall else {}
        symptoms = find_symptoms(before, now, WAITS_ON, PATIENCE.floor_s)
        found |= {(symptom.check, symptom.point): symptom.text for symptom in symptoms}
        before = now
    return found


def still(seconds: float, **fields: Any) -> list[Snapshot]:
    """Snapshots every 20 s in which nothing changes."""
    wanted = fields.pop("wanted", None)
    times = [20.0 * number for number in range(int(seconds / 20) + 1)]
    return [snapshot(at, replace(wanted, since_s=at) if wanted else None, **fields) for at in times]


# A stopped producer --------------------------------------------------------------------------------------


def test_a_search_that_holds_everything_up_is_named_and_not_the_rollout_that_waits_for_it():
    held = {"prompts": point(5), "rollout": point(4), "search": point(4, oldest_age_s=80.0)}
    found = found_in(*still(80, wanted=waits(), **held))
    assert list(found) == [("starved", "search")]
    assert "3 of 8 are there after 80 s" in found["starved", "search"]
    said = "search holds 4, the oldest for 80 s and has finished nothing for 80 s"
    assert said in found["starved", "search"]


OLDER = {"search": point(1, oldest_age_s=5.0), "generation": point(3, oldest_age_s=70.0)}


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (still(80, wanted=waits(), prompts=point(4), rollout=point(4), **OLDER), ("starved", "generation")),
        (still(80, wanted=waits()), ("starved", "prompts")),
        (still(80, wanted=waits(), warmup=True, rollout=point(4), search=point(4)), ("starved", "search")),
        (still(320, wanted=waits(), search=point(4, out=0)), ("starved", "search")),
        (still(280, wanted=waits(), search=point(4, out=0)), None),
        (still(40, wanted=waits(), search=point(4)), None),
        (still(200, search=point(4), rollout=point(4)), None),
        (still(200, wanted=waits(), search=point(4), ended=True), None),
    ],
    ids=[
        "the older call",
        "nothing in flight: what should feed",
        "in the warm-up",
        "nothing has ever left it",
        "nothing has ever left it, within the cold start",
        "before the limit",
        "nobody waits",
        "after the end of the run",
    ],
)
def test_what_stands_still_is_a_stall_if_somebody_waits_too_long(series, expected):
    assert list(found_in(*series)) == ([expected] if expected else [])


def test_a_slow_rollout_whose_tokens_still_come_is_no_stall():
    series = [
        snapshot(20.0 * n, waits(20.0 * n), rollout=point(4), generation=point(4, work=100 + n))
        for n in range(20)
    ]
    assert not found_in(*series)


def test_a_point_that_is_usually_slow_gets_twice_what_is_usual():
    moves = [snapshot(20.0 * n, waits(20.0 * n), search=point(4)) for n in range(7)]
    moves.append(snapshot(140, waits(140), search=point(4, out=11)))
    later = [snapshot(140 + 20.0 * n, waits(300), search=point(4, out=11)) for n in range(1, 12)]
    assert not found_in(*moves, *later)
    last = snapshot(400, waits(400), search=point(4, out=11))
    assert list(found_in(*moves, *later, last)) == [("starved", "search")]


def test_counts_that_are_not_rewritten_are_a_fault_of_the_trainer_and_no_stillness():
    series = still(100, wanted=waits(), search=point(4))
    frozen = [replace(taken, points=series[0].points, silent_s=taken.time) for taken in series]
    assert list(found_in(*frozen)) == [("no counts", "trainer")]


# Warm-up ---------------------------------------------------------------------------------------------


def test_a_warm_up_that_loses_what_it_gets_names_the_point_that_drops():
    before = snapshot(80, waits(80), warmup=True, buffer=point(3, role="queue"))
    now = snapshot(100, waits(100), warmup=True, buffer=point(3, dropped=5, role="queue"))
    assert ("warm-up stalled", "buffer") in found_in(before, now)
    fills = snapshot(100, waits(100, have=4), warmup=True, buffer=point(4, dropped=5, role="queue"))
    assert ("warm-up stalled", "buffer") not in found_in(before, fills)


# One set of limits for phases and queues ---------------------------------------------------------------


def test_a_limit_set_for_the_phase_holds_for_what_the_trainer_waits_for():
    slow = replace(PATIENCE, fixed={"rollout": 100.0})
    series = still(120, wanted=waits(), prompts=point(4), search=point(4))
    now = series[0]
    stalls = []
    for taken in series[1:]:
        now = follow(now, taken)
        stalls.append(flow_stall(now, WAITS_ON, slow, "rollout", 100.0))
    assert [stall is not None for stall in stalls] == [False, False, False, False, True, True]


def test_a_trainer_that_is_busy_in_a_phase_has_the_limit_of_that_phase():
    for seconds, found in ((280, []), (300, [("not drained", "buffer")])):
        series = still(seconds, buffer=point(20, role="queue"))
        assert list(found_in(*series, phase="update", phase_limit_s=300)) == found


def test_the_far_end_is_behind_every_point_that_waits_on_it():
    waits_on = {"prompts": ("rollout", "reward"), "rollout": ("search",), "reward": ("search",)}
    points = {"rollout": point(1, oldest_age_s=5), "reward": point(1, oldest_age_s=90), "search": point(1)}
    assert far_end(points, waits_on, "prompts") == "search"
    assert far_end({"search": point(0)}, waits_on, "prompts") is None


# Queues ---------------------------------------------------------------------------------------------


def test_a_queue_that_nobody_takes_from_is_named():
    found = found_in(*still(80, buffer=point(20, role="queue")))
    assert list(found) == [("not drained", "buffer")]
    assert "holds 20 and nothing has left it for 80 s" in found["not drained", "buffer"]


def test_time_in_which_the_machine_was_suspended_is_not_stillness():
    before, after = (snapshot(at, buffer=point(20, role="queue")) for at in (0, 3600))
    assert follow(before, after).points["buffer"].still_s == 3600
    assert follow(before, after, suspended=True).points["buffer"].still_s == 0


@pytest.mark.parametrize(("phase", "stalls"), [("checkpoint", False), ("update", True)])
def test_a_buffer_may_wait_while_a_checkpoint_is_written(phase, stalls, tmp_path):
    beats = tmp_path / "heartbeats.jsonl"
    last = snapshot(80, buffer=replace(point(20, role="queue"), still_s=10_000.0))
    signs = Signs(
        folder=tmp_path,
        heartbeats=beats,
        progress=tmp_path,
        patience=PATIENCE,
        writing_phases={"checkpoint": "global_step_*"},
        flow=lambda: last,
    )
    movement = Movement(signs, tmp_path / "trainer.log", WAITS_ON)
    now = time.time()
    beats.write_text(json.dumps({"time": now, "step": 1, "phase": phase}) + "\n")
    movement.clock.read()
    movement.clock.moved(now + 9_000)  # long after the start, and the phase itself has just moved
    found = movement.stall(now + 9_000)
    assert (found is not None and found.kind == "not drained") == stalls


def test_a_buffer_that_waits_for_more_is_no_undrained_queue():
    series = still(80, wanted=waits(), buffer=point(3, role="queue"), rollout=point(2, work=1))
    assert ("not drained", "buffer") not in found_in(*series)


def test_a_long_update_between_two_batches_is_usual_after_the_first():
    first = [snapshot(20.0 * n, buffer=point(20, role="queue")) for n in range(3)]
    second = [snapshot(60 + 20.0 * n, buffer=point(20, out=18, role="queue")) for n in range(4)]
    assert not found_in(*first, *second)


@pytest.mark.parametrize(
    ("before", "now", "reported"), [(7, 8, True), (8, 8, True), (9, 8, False), (6, 7, False)]
)
def test_a_bounded_queue_is_reported_from_four_fifths_on_unless_it_empties(before, now, reported):
    def at(time: float, depth: float) -> Snapshot:
        return snapshot(time, TransferQueue=point(depth, capacity=10, role="store"))

    found = found_in(at(0, before), at(5, now))
    assert list(found) == ([("queue near capacity", "TransferQueue")] if reported else [])


def test_errors_are_reported_when_they_grow_and_only_then():
    series = [snapshot(5.0 * n, prompts=point(errors=errors)) for n, errors in enumerate([0, 2, 2])]
    assert list(found_in(*series[:2])) == [("errors", "prompts")]
    assert not found_in(*series)


@pytest.mark.parametrize(("dropped", "reported"), [(1, False), (2, False), (3, True)])
def test_drops_are_reported_above_a_fifth_of_what_left(dropped, reported):
    before = snapshot(0, buffer=point(0, out=10, role="queue"))
    now = snapshot(5, buffer=point(0, out=18, dropped=dropped, role="queue"))
    assert list(found_in(before, now)) == ([("samples dropped", "buffer")] if reported else [])


# The sum ---------------------------------------------------------------------------------------------

WHOLE = Samples(asked=40, accepted=20, invalid=1, failed=2, stale=5, filtered=2, in_flight=10)
SHORT = replace(WHOLE, in_flight=7.0)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        (WHOLE, WHOLE, False),
        (SHORT, SHORT, True),
        (WHOLE, SHORT, False),
        (SHORT, WHOLE, False),
        (replace(SHORT, settled=False), replace(SHORT, settled=False), False),
    ],
    ids=["all there", "missing twice", "missing now", "missing before", "partly known"],
)
def test_samples_are_lost_if_two_snapshots_miss_them(before, now, lost):
    assert WHOLE.lost == 0
    found = found_in(snapshot(0, samples=before), snapshot(5, samples=now))
    assert bool(found) == lost
    assert not lost or "is 3 fewer" in found["samples lost", "between prompts and buffer"]


@pytest.mark.parametrize(
    ("filtered", "have", "found"),
    [
        (7, 0, []),
        (8, 0, ["groups score alike"]),
        (40, 5, []),
        (45, 5, ["groups score alike"]),
        (79, 7, ["groups score alike"]),
        (80, 7, ["groups score alike", "alike"]),
        (80, 8, []),
    ],
)
def test_groups_that_score_alike_are_an_alarm_from_one_batch_on_and_a_stall_from_ten(filtered, have, found):
    waiting = replace(waits(30.0, have=have), filtered=filtered)
    series = [snapshot(5.0 * n, waiting, rollout=point(4, out=10 + n)) for n in range(3)]
    assert {name for name, _ in found_in(*series)} == set(found)
    assert flow_stall(series[-1], WAITS_ON, PATIENCE) is None or "alike" in found


def test_a_healthy_run_has_neither_stall_nor_symptom():
    series = [
        snapshot(
            5.0 * n,
            waits(5.0, have=n % 8),
            prompts=point(5, out=10 + n),
            rollout=point(4, out=30 + n),
            search=point(2, out=50 + n, oldest_age_s=0.2),
            samples=WHOLE,
        )
        for n in range(60)
    ]
    assert not found_in(*series)
