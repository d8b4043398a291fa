"""Trajectories as data."""

import json

from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

calls = st.builds(
    SearchCall,
    raw=st.text(),
    queries=st.none() | st.lists(st.text(), min_size=1).map(tuple),
    response=st.none() | st.text(),
    failed=st.booleans(),
    error=st.none() | st.text(),
)
turns = st.builds(Turn, text=st.text(), calls=st.lists(calls, max_size=3).map(tuple), truncated=st.booleans())
trajectories = st.builds(Trajectory, turns=st.lists(turns, max_size=4).map(tuple))


@given(trajectories)
def test_json_round_trip_gives_the_same_trajectory(trajectory: Trajectory) -> None:
    assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


@given(trajectories)
def test_the_dict_form_is_plain_json_already(trajectory: Trajectory) -> None:
    data = trajectory.to_dict()
    assert json.loads(json.dumps(data)) == data


def test_only_answered_valid_calls_are_searches_and_evidence() -> None:
    answered = SearchCall("r", ("q",), response="found")
    others = (
        SearchCall("r", None, response="Error: no"),
        SearchCall("r", ("q",)),
        SearchCall("r", ("q",), failed=True, error="down"),
    )
    trajectory = Trajectory((Turn("a", (answered, others[0])), Turn("b", others[1:])))
    assert trajectory.searches == (answered,)
    assert [call for call in trajectory.calls if call.valid] == [answered, *others[1:]]
    assert trajectory.failed_calls == others[2:]


def test_an_empty_trajectory_ends_in_no_text() -> None:
    assert Trajectory().final_text == ""
