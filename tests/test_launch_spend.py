"""What a run has cost, and when its money runs out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.spend import SILENT_S, Call, Spend, money_ends_at, other_launch_running

SUM = st.floats(0.01, 1e4)


def test_calls_add_up_over_starts(tmp_path):
    first = Spend(tmp_path)
    first.begin("a", 0, 100.0, 36.0).until = 200.0
    first.write()
    second = Spend(tmp_path)
    second.begin("a", 1, 500.0, 72.0).until = 550.0
    assert second.usd == 1.0 + 1.0


@given(now=st.floats(0, 2e9), spent=SUM, rate=SUM, limit=SUM)
def test_at_the_end_of_the_money_exactly_the_limit_is_spent(now, spent, rate, limit):
    ends = money_ends_at(now, spent, rate, limit)
    assert ends >= now
    if limit > spent:
        assert abs(spent + (ends - now) / 3600 * rate - limit) < 1e-3 * limit + 1e-3 * rate


def test_without_a_limit_or_a_price_money_never_runs_out():
    assert money_ends_at(0.0, 1.0, 10.0, None) == float("inf")
    assert money_ends_at(0.0, 1.0, 0.0, 5.0) == float("inf")


# Another launch of the same run -----------------------------------------------------------------------------

NOW = 1e9


def state(outcome: str | None, launch: str = "first") -> dict[str, object]:
    return {
        "launch": launch,
        "part": 0,
        "app": "ap-1",
        "outcome": None if outcome is None else {"state": outcome},
    }


def last_update(ago: float) -> list[Call]:
    return [Call("first", 0, NOW - 1e4, NOW - ago, 1.0)]


@pytest.mark.parametrize("outcome", [None, "continue"])
def test_a_launch_that_was_running_just_now_is_reported_with_its_app(outcome):
    reason = other_launch_running(state(outcome), last_update(20), "second", NOW)
    assert reason is not None and "20 s ago" in reason and "modal app stop ap-1" in reason


@pytest.mark.parametrize("outcome", ["finished", "failed", "out of money", "interrupted"])
def test_a_launch_that_has_ended_does_not_block_another(outcome):
    assert other_launch_running(state(outcome), last_update(20), "second", NOW) is None


def test_a_launch_that_was_killed_blocks_another_only_for_a_while():
    assert other_launch_running(state(None), last_update(SILENT_S + 1), "second", NOW) is None


def test_a_launchs_own_restarted_call_is_not_blocked():
    assert other_launch_running(state(None), last_update(20), "first", NOW) is None


def test_without_a_launch_nothing_is_blocked():
    assert other_launch_running(None, [], "second", NOW) is None
