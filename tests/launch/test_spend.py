"""The cost of a run, and the time when its money runs out."""

from hypothesis import given
from hypothesis import strategies as st

from drzero.launch.spend import Spend, money_ends_at

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
