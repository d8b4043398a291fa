"""Whether another launch of a run is at work, by what is known of its last one."""

import pytest

from launch.at_work import SILENT_S, other_at_work
from launch.spend import Call

NOW = 1e9


def state(outcome: str | None, launch: str = "first") -> dict[str, object]:
    return {
        "launch": launch,
        "part": 0,
        "app": "ap-1",
        "outcome": None if outcome is None else {"state": outcome},
    }


def heard_of(ago: float) -> list[Call]:
    return [Call("first", 0, NOW - 1e4, NOW - ago, 1.0)]


@pytest.mark.parametrize("outcome", [None, "continue"])
def test_one_that_was_just_heard_of_is_told_with_its_app(outcome):
    told = other_at_work(state(outcome), heard_of(20), "second", NOW)
    assert told is not None and "20 s ago" in told and "modal app stop ap-1" in told


@pytest.mark.parametrize("outcome", ["finished", "failed", "out of money", "interrupted"])
def test_one_that_has_ended_is_no_hindrance(outcome):
    assert other_at_work(state(outcome), heard_of(20), "second", NOW) is None


def test_one_that_has_died_without_a_word_is_no_hindrance_for_long():
    assert other_at_work(state(None), heard_of(SILENT_S + 1), "second", NOW) is None


def test_the_launchs_own_call_that_is_started_again_is_none():
    assert other_at_work(state(None), heard_of(20), "first", NOW) is None


def test_without_a_launch_there_is_none():
    assert other_at_work(None, [], "second", NOW) is None
