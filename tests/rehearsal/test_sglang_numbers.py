"""SGLang, the reference engine, Transformers and veRL's actor compute the same, in conversations with tools.

The demo's policy (135M) in float32. Every engine continues the same prompts greedily, and the actor makes one
update from each engine's log-probabilities. `-rP` shows the figures of docs/sglang.md.
"""

import asyncio
from dataclasses import dataclass

import httpx
import pytest
import torch
from actor_steps import actor_config, make_steps, training_row
from sglang_server import serving

from data.demo_world import generate_world
from drzero.policies.demonstrations import make_demonstrations, world_retriever
from drzero.stages.demo_models import POLICY_NAME, prepare_demo_models
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import load_model
from verl_ext.engine.sampling import SamplingParams
from verl_ext.method.chat import render_prompt_ids, turn_end_id
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

CONTEXT, NEW_TOKENS = 2048, 48
# Nats a token. Another order of sums changes about 1e-5, another weight 1e-2 or more.
LOG_PROB_BOUND = 2e-4
pytestmark = [pytest.mark.slow("starts SGLang; CPU minutes of a 135M model"), pytest.mark.timeout(1800)]

Ids = list[int]


@dataclass
class Continued:
    """An engine's tokens for each prompt, and their log-probabilities."""

    tokens: list[Ids]
    log_probs: list[torch.Tensor]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    prepare_demo_models(folder)
    return folder / POLICY_NAME


@pytest.fixture(scope="module")
def tokenizer(policy):
    return load_model(str(policy))[1]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    world = generate_world(17, "warmstart", passages=240, chains_per_hop=40)
    conversations = make_demonstrations(
        world, challenger={2: 1}, solver={1: 1, 2: 1}, retrieve=world_retriever(world)
    )
    ids = []
    for conversation in conversations:
        messages = conversation["messages"]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(turns) > 1 and any(message["role"] == "tool" for message in messages)
        for turn in (turns[0], turns[-1]):
            ids.append(render_prompt_ids(tokenizer, messages[:turn], [SEARCH_TOOL_SCHEMA]))
    return ids


def by_sglang(url, prompts, end):
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "stop_token_ids": [end]}
    request = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    answers = httpx.post(f"{url}/generate", json=request, timeout=600, trust_env=False).json()
    pairs = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    return Continued(
        [answer["output_ids"] for answer in answers],
        [torch.tensor([log_prob for log_prob, *_ in row]) for row in pairs],
    )


def by_reference(model, prompts, end):
    engine = ReferenceEngine(model, eos_token_ids=[end], max_seq_len=CONTEXT)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)

    async def together():
        return await asyncio.gather(*[engine.generate(ids, greedy) for ids in prompts])

    try:
        made = asyncio.run(together())
    finally:
        engine.close()
    return Continued([each.token_ids for each in made], [torch.tensor(each.log_probs) for each in made])


def by_transformers(model, prompts, end):
    model.set_attn_implementation("sdpa")
    made = Continued([], [])
    for ids in prompts:
        output = model.generate(
            torch.tensor([ids]),
            **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end},
            **{"return_dict_in_generate": True, "output_logits": True},
        )
        tokens = output.sequences[0, len(ids) :]
        logits_RV = torch.cat(output.logits)
        made.tokens.append(tokens.tolist())
        made.log_probs.append(logits_RV.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))
    return made


@pytest.fixture(scope="module")
def engines(sglang_python, policy, tokenizer, prompts, tmp_path_factory):
    end = turn_end_id(tokenizer)
    log = tmp_path_factory.mktemp("logs") / "sglang.log"
    with serving(sglang_python, policy, log, CONTEXT, sequences=len(prompts)) as url:
        made = {"SGLang": by_sglang(url, prompts, end)}
    made["reference engine"] = by_reference(load_model(str(policy))[0], prompts, end)
    made["Transformers"] = by_transformers(load_model(str(policy))[0], prompts, end)
    return made


@pytest.fixture(scope="module")
def steps(engines, prompts, policy, tmp_path_factory):
    def rows(made):
        return [
            training_row(
                torch.tensor(prompt + tokens),
                torch.ones(len(tokens), dtype=torch.int64),
                log_probs_R,
                # As if from a group whose rewards differ.
                torch.tensor(1.0 if index % 2 else -1.0),
            )
            for index, (prompt, tokens, log_probs_R) in enumerate(
                zip(prompts, made.tokens, made.log_probs, strict=True)
            )
        ]

    cases = {
        name: {
            "actor": {"policy_loss": {"rollout_correction": {"loss_type": "ppo_clip"}}},
            "micro_batch": 1,
            "rows": rows(made),
            "score": True,
        }
        for name, made in engines.items()
    }
    return make_steps(tmp_path_factory.mktemp("steps"), actor_config(policy), cases)


@pytest.fixture(scope="module")
def actor(steps, engines):
    scored = steps["Transformers"]["log_probs"]
    return [
        row_T[-len(tokens) :] for row_T, tokens in zip(scored, engines["Transformers"].tokens, strict=True)
    ]


def largest_gap(left, right):
    return max((a_R - b_R).abs().max().item() for a_R, b_R in zip(left, right, strict=True))


@pytest.mark.parametrize("engine", ["SGLang", "reference engine"])
def test_greedy_tokens_equal_transformers(engines, engine):
    assert engines[engine].tokens == engines["Transformers"].tokens
    assert any(len(set(tokens)) > 8 for tokens in engines[engine].tokens)


@pytest.mark.parametrize("engine", ["SGLang", "reference engine", "Transformers"])
def test_log_probabilities_equal_the_actors(engines, actor, engine):
    gap = largest_gap(engines[engine].log_probs, actor)
    print(f"{engine} and the actor: at most {gap:.1e} nats a token")
    assert 0 < gap < LOG_PROB_BOUND


def test_engines_agree_with_each_other(engines):
    gap = largest_gap(engines["SGLang"].log_probs, engines["reference engine"].log_probs)
    print(f"SGLang and the reference engine: at most {gap:.1e} nats a token")
    assert gap < LOG_PROB_BOUND


@pytest.mark.parametrize("engine", ["SGLang", "reference engine"])
def test_a_training_step_moves_the_weights_alike(steps, engine):
    expected, moved = steps["Transformers"]["moved"], steps[engine]["moved"]
    largest = max(move.abs().max() for move in expected.values())
    gap = max((moved[name] - expected[name]).abs().max() for name in expected)
    print(f"{engine}: a step's weights differ by at most {gap / largest:.1e} of the largest move")
    assert largest > 1e-3
    assert 0 < gap < 1e-3 * largest
