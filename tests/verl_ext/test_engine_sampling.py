"""The sampler: which ids can be drawn, how often, and which log-probability is recorded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.engine.sampling import LEAST, SamplingParams, sample

VOCABULARY = 12
logits_rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
uniforms = st.floats(0, 1, exclude_max=True)


def draw_one(row, params, uniform):
    ids, log_probs = sample(torch.tensor([row]), [params], [uniform])
    return int(ids[0]), float(log_probs[0])


@given(logits_rows, uniforms)
def test_greedy_and_top_one_take_the_largest_logit(row, uniform):
    greedy, _ = draw_one(row, SamplingParams(temperature=0), uniform)
    top_one, _ = draw_one(row, SamplingParams(top_k=1), uniform)
    assert row[greedy] == row[top_one] == max(row)


@given(logits_rows, uniforms, st.integers(1, VOCABULARY))
def test_top_k_draws_only_among_the_k_largest(row, uniform, k):
    drawn, _ = draw_one(row, SamplingParams(top_k=k), uniform)
    assert sum(logit > row[drawn] for logit in row) < k


@given(logits_rows, uniforms, st.floats(0.05, 1))
def test_top_p_draws_from_the_smallest_set(row, uniform, top_p):
    drawn, _ = draw_one(row, SamplingParams(top_p=top_p), uniform)
    probs = torch.tensor(row).double().softmax(0)
    larger = probs > probs[drawn] * (1 + 1e-5)  # float32 cannot order closer ones
    assert probs[larger].sum() < top_p + 1e-5


@given(logits_rows, uniforms, st.just(0) | st.floats(0.2, 3), st.integers(0, 5), st.floats(0.3, 1))
def test_the_log_prob_is_of_the_full_tempered_distribution(row, uniform, temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn, log_prob = draw_one(row, params, uniform)
    expected = (torch.tensor(row).double() / (temperature or 1)).log_softmax(0)[drawn]  # greedy: untempered
    assert log_prob == pytest.approx(float(expected), abs=1e-4)


def test_logits_with_equal_probabilities_are_still_ordered():
    row = [0.0] * (VOCABULARY - 1) + [1.5e-19]
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert draw_one(row, params, 0.0)[0] == VOCABULARY - 1


@given(logits_rows, uniforms, st.floats(LEAST, 1 / LEAST), st.integers(-1, 2**31 - 1), st.floats(LEAST, 1))
def test_every_permitted_request_draws_a_possible_id(row, uniform, temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn, log_prob = draw_one(row, params, uniform)
    assert 0 <= drawn < VOCABULARY
    assert -math.inf < log_prob <= 0


@given(st.lists(st.booleans(), min_size=2, max_size=8).filter(any), uniforms)
def test_an_id_of_probability_zero_is_never_drawn(possible, uniform):
    row = [0.0 if allowed else float("-inf") for allowed in possible]
    drawn, _ = draw_one(row, SamplingParams(), uniform)
    assert possible[drawn]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_valid_ids(uniform):
    drawn, _ = draw_one([0.0] * VOCABULARY, SamplingParams(), uniform)
    assert drawn == (0 if uniform == 0 else VOCABULARY - 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature):
    row, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), 4000
    params = [SamplingParams(temperature=temperature)] * draws
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(1)).tolist()
    ids, _ = sample(row.expand(draws, -1), params, uniform)
    frequencies = torch.bincount(ids, minlength=4) / draws
    # Four standard deviations of a frequency over 4000 draws are at most 0.032.
    assert torch.allclose(frequencies, (row / temperature).softmax(0), atol=0.032)


def test_rows_with_different_parameters_do_not_affect_each_other():
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    mixed = [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.6}]
    params = [SamplingParams(**one) for one in mixed]
    together, _ = sample(logits, params, [0.1, 0.4, 0.8, 0.9])
    alone = [draw_one(logits[i].tolist(), params[i], [0.1, 0.4, 0.8, 0.9][i])[0] for i in range(4)]
    assert together.tolist() == alone


FAR = [("temperature", 1e-45), ("temperature", 1e-300), ("temperature", 1e300), ("top_p", 1e-300)]
BAD = [("max_tokens", 0), ("temperature", -1), ("temperature", math.nan), ("top_p", 0), ("top_p", 1.5)]
BAD += [("top_k", -2), ("top_k", 2**70)]


@pytest.mark.parametrize(("field", "value"), BAD + FAR)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    arguments = {field: value}
    with pytest.raises(ValueError, match=field):
        SamplingParams(**arguments)
