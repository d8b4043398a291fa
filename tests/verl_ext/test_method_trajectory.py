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
def test_a_trajectory_survives_json(trajectory):
    data = trajectory.to_dict()
    assert json.loads(json.dumps(data)) == data and Trajectory.from_dict(data) == trajectory


def test_only_answered_valid_calls_are_searches():
    answered = SearchCall("r", ("q",), response="found")
    invalid, open_call = SearchCall("r", None, response="Error: no"), SearchCall("r", ("q",))
    others = (invalid, open_call, SearchCall("r", ("q",), failed=True, error="down"))
    trajectory = Trajectory((Turn("a", (answered, others[0])), Turn("b", others[1:])))
    assert trajectory.searches == (answered,)
    assert [call for call in trajectory.calls if call.valid] == [answered, *others[1:]]
    assert trajectory.failed_calls == others[2:]
