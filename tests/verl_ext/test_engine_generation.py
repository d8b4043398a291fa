"""The engine against transformers' own `generate`: tokens, log-probs, prefixes, weights, failures."""

import asyncio
import sys
import threading
from functools import partial

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl_ext.engine.engine import EngineFailure, ReferenceEngine
from verl_ext.engine.sampling import SamplingParams

VOCABULARY = 320
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than the usual 0.02, so that next-token distributions are far from uniform.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GREEDY = SamplingParams(max_tokens=20, temperature=0)


def tiny(kind, config, seed=0, **changes):
    torch.manual_seed(seed)
    return kind(config(**SHAPE, **changes)).eval()


tiny_llama = partial(tiny, LlamaForCausalLM, LlamaConfig)
tiny_qwen2 = partial(tiny, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True)
tiny_qwen3 = partial(tiny, Qwen3ForCausalLM, Qwen3Config, head_dim=32)


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def expected_greedy(model, prompt, tokens, eos=None):
    """The result of transformers' own generate, cache and sdpa attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    model.set_attn_implementation(before)
    return output[0, len(prompt) :].tolist()


def expected_log_probs(model, prompt, response, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response)[:, None]).squeeze(1)


@pytest.fixture
def engine_of():
    engines = []

    def build(model, **options):
        engines.append(ReferenceEngine(model, **{"eos_token_ids": [], "max_seq_len": 200, **options}))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


async def gather(engine, prompts, params):
    return await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_qwen3], ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 24])
def test_greedy_generations_equal_transformers(build, prefix_cache_bytes, engine_of):
    reference, engine = build(), engine_of(build(), prefix_cache_bytes=prefix_cache_bytes, max_batch_size=3)
    prompts = [prompt_of(length) for length in (1, 2, 7, 40, 130)] + [prompt_of(40)]
    for prompt, generation in zip(prompts, asyncio.run(gather(engine, prompts, GREEDY)), strict=True):
        assert generation.token_ids == expected_greedy(reference, prompt, GREEDY.max_tokens)
        expected = expected_log_probs(reference, prompt, generation.token_ids)
        assert torch.allclose(torch.tensor(generation.log_probs), expected, atol=1e-4)


def test_joining_and_leaving_requests_do_not_change_a_batch(engine_of):
    model, reference = tiny_llama(), tiny_llama()
    engine = engine_of(model, max_batch_size=4)
    lengths = [(5 + 9 * i, 3 + 11 * (i % 4)) for i in range(9)]

    async def staggered():
        async def later(index):
            await asyncio.sleep(0.01 * index)
            length, tokens = lengths[index]
            return await engine.generate(prompt_of(length), SamplingParams(tokens, temperature=0))

        return await asyncio.gather(*[later(i) for i in range(len(lengths))])

    for (length, tokens), generation in zip(lengths, asyncio.run(staggered()), strict=True):
        assert generation.token_ids == expected_greedy(reference, prompt_of(length), tokens)


def test_eos_ends_the_response_and_belongs_to_it(engine_of):
    reference, prompt = tiny_llama(), prompt_of(9)
    eos = expected_greedy(reference, prompt, 20)[6]
    generation = asyncio.run(engine_of(tiny_llama(), eos_token_ids=[eos]).generate(prompt, GREEDY))
    assert generation.token_ids == expected_greedy(reference, prompt, 20, eos)
    assert (generation.token_ids[-1], generation.finish_reason) == (eos, "stop")


def test_a_requests_own_stop_id_ends_only_that_request(engine_of):
    prompt, engine = prompt_of(9), engine_of(tiny_llama())
    free = asyncio.run(engine.generate(prompt, GREEDY))
    stop = free.token_ids[4]
    stopping = SamplingParams(20, temperature=0, stop_token_ids=(stop,))

    async def both():
        return await asyncio.gather(engine.generate(prompt, stopping), engine.generate(prompt, GREEDY))

    stopped, unstopped = asyncio.run(both())
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert unstopped.token_ids == free.token_ids


def test_the_response_ends_at_max_seq_len_with_reason_length(engine_of):
    generation = asyncio.run(engine_of(tiny_llama(), max_seq_len=12).generate(prompt_of(9), GREEDY))
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


@pytest.mark.parametrize("prompt", [[], prompt_of(200), [VOCABULARY], [-1], [2**63], [-(2**63) - 1]])
def test_a_bad_prompt_is_refused_and_the_engine_keeps_serving(prompt, engine_of):
    engine = engine_of(tiny_llama())
    with pytest.raises(ValueError, match="prompt"):
        asyncio.run(engine.generate(prompt, GREEDY))
    assert asyncio.run(engine.generate(prompt_of(5), GREEDY)).token_ids


def test_equal_prompts_in_flight_are_computed_once(engine_of):
    engine = engine_of(tiny_llama(), prefix_cache_bytes=0)
    asyncio.run(gather(engine, [prompt_of(60)] * 5, SamplingParams(max_tokens=8)))
    # The last prompt id always goes through the decode forward, which gives its logits.
    assert engine.stats().prefix_tokens_reused == 4 * 59


def test_the_next_turn_computes_only_its_new_tokens(engine_of):
    engine, prompt = engine_of(tiny_llama()), prompt_of(50)
    first = asyncio.run(engine.generate(prompt, GREEDY))
    second_prompt = prompt + first.token_ids + prompt_of(30, seed=1)
    second = asyncio.run(engine.generate(second_prompt, GREEDY))
    assert engine.stats().prefix_tokens_reused == len(prompt) + len(first.token_ids) - 1
    assert second.token_ids == expected_greedy(tiny_llama(), second_prompt, GREEDY.max_tokens)


def test_the_prefix_cache_stays_within_its_bytes(engine_of):
    bytes_per_position = 2 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head size, float32
    engine = engine_of(tiny_llama(), prefix_cache_bytes=100 * bytes_per_position)
    asyncio.run(gather(engine, [prompt_of(40, seed) for seed in range(6)], SamplingParams(max_tokens=5)))
    assert 0 < engine.stats().prefix_cache_bytes <= 100 * bytes_per_position


def test_sampled_log_probs_are_the_models_at_the_temperature(engine_of):
    engine, prompt = engine_of(tiny_llama()), prompt_of(20)
    generation = asyncio.run(engine.generate(prompt, SamplingParams(30, temperature=0.7, top_k=5)))
    expected = expected_log_probs(tiny_llama(), prompt, generation.token_ids, 0.7)
    assert generation.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_seeded_request_draws_the_same_in_any_batch(engine_of):
    engine, seeded = engine_of(tiny_llama()), SamplingParams(20, seed=7)
    alone = asyncio.run(engine.generate(prompt_of(20), seeded))

    async def crowded():
        others = [engine.generate(prompt_of(n), SamplingParams(30)) for n in (3, 33, 63)]
        return await asyncio.gather(*others, engine.generate(prompt_of(20), seeded))

    assert asyncio.run(crowded())[-1].token_ids == alone.token_ids


def test_unseeded_attempts_differ_and_repeat_with_the_engines_seed(engine_of):
    def attempts():
        engine = engine_of(tiny_llama(), seed=3)
        return [g.token_ids for g in asyncio.run(gather(engine, [prompt_of(20)] * 3, SamplingParams(12)))]

    first, second = attempts(), attempts()
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_updated_weights_generate_like_the_new_model(engine_of):
    engine, new, prompt = engine_of(tiny_llama()), tiny_llama(seed=1), prompt_of(25)
    asyncio.run(engine.generate(prompt, GREEDY))
    asyncio.run(engine.update_weights(new.state_dict().items()))
    generation = asyncio.run(engine.generate(prompt, GREEDY))
    assert generation.token_ids == expected_greedy(new, prompt, GREEDY.max_tokens)
    expected = expected_log_probs(new, prompt, generation.token_ids)
    assert generation.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_tied_lm_head_may_be_missing_from_an_update(engine_of):
    model = tiny_qwen2()
    weights = dict(model.state_dict())
    weights = {name: tensor.clone() for name, tensor in weights.items() if name != "lm_head.weight"}
    asyncio.run(engine_of(model).update_weights(weights.items()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "are missing.*model.norm.weight"),
        (lambda weights: weights.update(nonsense=torch.zeros(1)), "no weight named 'nonsense'"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), r"shape \(3,\)"),
    ],
)
def test_a_bad_update_blocks_generation_until_a_good_one(damage, message, engine_of):
    engine, weights = engine_of(tiny_llama()), dict(tiny_llama(seed=1).state_dict())
    damage(weights)
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.update_weights(weights.items()))
    with pytest.raises(EngineFailure, match="half way"):
        asyncio.run(engine.generate(prompt_of(5), GREEDY))
    asyncio.run(engine.update_weights(tiny_llama(seed=1).state_dict().items()))
    assert asyncio.run(engine.generate(prompt_of(5), GREEDY)).token_ids


async def start_long_request(engine):
    """A request that decodes for longer than the test."""
    task = asyncio.create_task(engine.generate(prompt_of(5), SamplingParams(100_000)))
    while not engine.stats().running:
        await asyncio.sleep(0.005)
    return task


def test_a_cancelled_request_frees_its_slot(engine_of):
    engine = engine_of(tiny_llama(), max_batch_size=1, max_seq_len=150_000)

    async def cancel_then_generate():
        (await start_long_request(engine)).cancel()
        return await engine.generate(prompt_of(8), GREEDY)

    assert asyncio.run(cancel_then_generate()).token_ids == expected_greedy(tiny_llama(), prompt_of(8), 20)


def test_an_update_is_refused_during_requests_and_closing_aborts_them(engine_of):
    engine = engine_of(tiny_llama(), max_seq_len=150_000)

    async def scenario():
        task = await start_long_request(engine)
        with pytest.raises(RuntimeError, match="1 requests in flight"):
            await engine.update_weights(tiny_llama(seed=1).state_dict().items())
        engine.close()
        return await task

    generation = asyncio.run(scenario())
    assert generation.finish_reason == "aborted"
    assert len(generation.token_ids) == len(generation.log_probs) > 0
    with pytest.raises(EngineFailure, match="closed"):
        asyncio.run(engine.generate(prompt_of(5), GREEDY))


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"], ids=["decoding", "prefilling"])
def test_a_failed_forward_ends_only_its_requests(engine_of, part):
    model = tiny_llama()
    engine = engine_of(model, max_batch_size=2)

    def broken(*args, **kwargs):
        raise ArithmeticError("the forward broke")

    hook = model.get_submodule(part).register_forward_hook(broken)

    async def scenario():
        requests = [engine.generate(prompt_of(5 + i), GREEDY) for i in range(4)]
        return await asyncio.gather(*requests, return_exceptions=True)

    for outcome in asyncio.run(scenario()):
        assert isinstance(outcome, EngineFailure)
        assert "the forward broke" in str(outcome)
    hook.remove()
    expected = [expected_greedy(tiny_llama(), prompt_of(n), GREEDY.max_tokens) for n in (5, 9)]
    generations = asyncio.run(gather(engine, [prompt_of(5), prompt_of(9)], GREEDY))
    assert [generation.token_ids for generation in generations] == expected


def test_one_requests_error_leaves_the_others_alone(engine_of):
    engine = engine_of(tiny_llama())

    def broken(token_ids):
        return 1 / (3 - len(token_ids)) > 1  # fails at its third id

    async def scenario():
        requests = [engine.generate(prompt_of(n), GREEDY, broken if n == 9 else None) for n in (5, 9, 30)]
        return await asyncio.gather(*requests, return_exceptions=True)

    first, failed, last = asyncio.run(scenario())
    assert isinstance(failed, EngineFailure)
    assert "ZeroDivisionError" in str(failed)
    for generation, length in ((first, 5), (last, 30)):
        assert generation.token_ids == expected_greedy(tiny_llama(), prompt_of(length), GREEDY.max_tokens)


def test_a_prompt_with_nan_states_spoils_no_other_request(engine_of):
    model = tiny_llama()
    poison = VOCABULARY - 1
    model.model.embed_tokens.weight.data[poison] = float("nan")  # also in the cache of its slot
    engine = engine_of(model)

    async def scenario():
        prompts = [prompt_of(30), [*prompt_of(60), poison, 5]]
        requests = [engine.generate(prompt, GREEDY) for prompt in prompts]
        # The second round reuses the slots, with shorter and longer prompts side by side.
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        return outcomes + await gather(engine, [prompt_of(40), prompt_of(9)], GREEDY)

    first, failed, *later = asyncio.run(scenario())
    assert isinstance(failed, EngineFailure)
    assert "NaN" in str(failed)
    for generation, length in zip([first, *later], (30, 40, 9), strict=True):
        assert generation.token_ids == expected_greedy(tiny_llama(), prompt_of(length), GREEDY.max_tokens)


def test_an_error_of_the_loop_ends_the_engine_and_is_reported(engine_of):
    engine, crashed = engine_of(tiny_llama()), threading.Event()
    engine.on_crash = crashed.set
    with pytest.raises(EngineFailure, match="lost"):
        asyncio.run(engine.generate(prompt_of(5), GREEDY, lambda token_ids: sys.exit("lost")))
    assert crashed.wait(60)
    assert isinstance(engine.failure, SystemExit)
    with pytest.raises(EngineFailure, match="lost"):
        asyncio.run(engine.generate(prompt_of(5), GREEDY))


def test_a_model_with_sliding_windows_is_refused():
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        ReferenceEngine(Qwen2ForCausalLM(config), eos_token_ids=[])
