"""Token drift: a rollout trains on the ids that were sampled, and turns only grow."""

from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.method.trajectory import token_drift

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@dataclass
class Rollout:
    """One rollout as the engine saw it (`sampled`) and as it will be trained on."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    sampled: list[tuple[list[int], list[int]]]

    def drift(self):
        output = AgentLoopOutput(
            prompt_ids=self.prompt,
            response_ids=self.response,
            response_mask=self.mask,
            metrics=AgentLoopMetrics(),
        )
        return token_drift(output, self.sampled)


def play(prompt, turns, length=10_000):
    """A rollout that keeps the rules. Each turn has the ids sampled and the tool's ids."""
    context, sampled, mask = list(prompt), [], []
    for drawn, answer in turns:
        sampled.append((list(context), list(drawn)))
        context += drawn + answer
        mask += [1] * len(drawn) + [0] * len(answer)
    return Rollout(list(prompt), context[len(prompt) :][:length], mask[:length], sampled)


TURNS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4)


@given(IDS, TURNS, st.integers(1, 12))
def test_a_rollout_that_only_grows_has_no_drift(prompt, turns, length):
    assert play(prompt, turns).drift() == play(prompt, turns, length).drift() == 0


@given(IDS, TURNS, st.data())
def test_a_trained_id_that_was_not_sampled_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    place = data.draw(st.sampled_from([i for i, kept in enumerate(rollout.mask) if kept]))
    rollout.response[place] += 1
    assert rollout.drift() == 1


@given(IDS, st.lists(st.tuples(IDS, IDS), min_size=2, max_size=4), st.data())
def test_a_changed_id_in_a_later_input_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    turn = data.draw(st.integers(1, len(turns) - 1))
    known = len(rollout.sampled[turn - 1][0]) + len(rollout.sampled[turn - 1][1])
    rollout.sampled[turn][0][data.draw(st.integers(0, known - 1))] += 1
    assert rollout.drift() == 1


@given(IDS, TURNS, st.data())
def test_training_on_a_tools_answer_is_drift(prompt, turns, data):
    rollout = play(prompt, turns)
    place = data.draw(st.sampled_from([i for i, kept in enumerate(rollout.mask) if not kept]))
    rollout.mask[place] = 1
    drawn = [token for _, ids in rollout.sampled for token in ids]
    trained = [token for token, kept in zip(rollout.response, rollout.mask, strict=True) if kept]
    assume(trained != drawn[: len(trained)])
    assert rollout.drift() == 1


SPOIL = {
    "another prompt": lambda rollout: rollout.prompt.append(1),
    "nothing trained on": lambda rollout: rollout.mask.__setitem__(slice(None), [0] * len(rollout.mask)),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_a_row_with_other_samples_is_drift(spoil):
    rollout = play([1, 2], [([3], [4]), ([5], [])])
    spoil(rollout)
    assert rollout.drift() == 1
