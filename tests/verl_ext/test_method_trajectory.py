"""Trajectories as data, and token drift: training uses the sampled ids, and turns only grow."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from verl_ext.method.trajectory import SearchCall, Trajectory, Turn, token_drift

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


IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@dataclass
class Rollout:
    """One rollout as the engine saw it (`sampled`) and as it will be trained on."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    sampled: list[tuple[list[int], list[int]]]

    def drift(self):
        return token_drift(self, self.sampled)


def play(prompt, turns, length=10_000):
    """A rollout that keeps the rules. Each turn has the ids sampled and the tool's ids."""
    context, sampled, mask = list(prompt), [], []
    for drawn, answer in turns:
        sampled.append((list(context), list(drawn)))
        context += drawn + answer
        mask += [1] * len(drawn) + [0] * len(answer)
    return Rollout(list(prompt), context[len(prompt) :][:length], mask[:length], sampled)


DRAWN = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4)


@given(IDS, DRAWN, st.integers(1, 12))
def test_a_rollout_that_only_grows_has_no_drift(prompt, turns, length):
    assert play(prompt, turns).drift() == play(prompt, turns, length).drift() == 0


@given(IDS, DRAWN, st.data())
def test_a_trained_id_that_was_not_sampled_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    place = data.draw(st.sampled_from([i for i, kept in enumerate(rollout.response_mask) if kept]))
    rollout.response_ids[place] += 1
    assert rollout.drift() == 1


@given(IDS, st.lists(st.tuples(IDS, IDS), min_size=2, max_size=4), st.data())
def test_a_changed_id_in_a_later_input_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    turn = data.draw(st.integers(1, len(turns) - 1))
    known = len(rollout.sampled[turn - 1][0]) + len(rollout.sampled[turn - 1][1])
    rollout.sampled[turn][0][data.draw(st.integers(0, known - 1))] += 1
    assert rollout.drift() == 1


@given(IDS, DRAWN, st.data())
def test_training_on_a_tools_answer_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    place = data.draw(st.sampled_from([i for i, kept in enumerate(rollout.response_mask) if not kept]))
    rollout.response_mask[place] = 1
    drawn = [token for _, ids in rollout.sampled for token in ids]
    trained = [token for token, kept in zip(rollout.response_ids, rollout.response_mask, strict=True) if kept]
    assume(trained != drawn[: len(trained)])
    assert rollout.drift() == 1


SPOIL = {
    "another prompt": lambda rollout: rollout.prompt_ids.append(1),
    "nothing trained on": lambda rollout: rollout.response_mask.__setitem__(
        slice(None), [0] * len(rollout.response_mask)
    ),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_a_row_with_other_samples_is_drift(spoil):
    rollout = play([1, 2], [([3], [4]), ([5], [])])
    spoil(rollout)
    assert rollout.drift() == 1
