"""Micro-batches do not change an update: by rows or by tokens, with or without what the GPU profiles add.

Loss and gradients come from veRL's own worker in float32. Its rows have uneven lengths; some are spoiled or
padding, and some groups hold one row. Both stages' advantages and losses are tried.
"""

from itertools import product

import numpy as np
import pytest
import torch
from actor_steps import PADDING, PROMPT, SPOILED, TOKENS, actor_config, make_steps, save_policy, training_row
from omegaconf import OmegaConf

from drzero.recipe.compose import compose_plain, resolve
from verl_ext.method.advantages import group_advantages, hop_advantages

ROWS = 32
METHODS = {"HRPO": "reinforce", "GRPO": "ppo_clip"}
BATCHES = {"one row at a time": {"micro_batch": 1}, "four rows": {"micro_batch": 4}}
BATCHES |= {"40 tokens": {"tokens": 40}, "all tokens at once": {"tokens": 10_000}}
CLOSE = {"rtol": 0.0, "atol": 1e-6}


def rows_of(method):
    """Rows of 5 to 30 tokens; the last prompt and one hop count have a single valid row."""
    draw = torch.Generator().manual_seed(1)
    counts = np.array([row not in SPOILED and row not in PADDING for row in range(ROWS)])
    rewards = torch.rand(ROWS, generator=draw).numpy()
    hops, prompts = np.arange(ROWS) % 3, np.arange(ROWS) // 5
    hops[0] = 4
    is_hrpo, rows = method == "HRPO", []
    valued = hop_advantages(rewards, hops, counts) if is_hrpo else group_advantages(rewards, prompts, counts)
    for row in range(ROWS):
        length = 1 if row in PADDING else int(torch.randint(1, 27, (1,), generator=draw))
        ids_T = torch.randint(100, TOKENS, (PROMPT + length,), generator=draw)
        mask_R = torch.ones(length, dtype=torch.int64) * bool(counts[row])
        log_probs_R = -6.9 - torch.rand(length, generator=draw) / 5
        advantage = torch.tensor([valued[row]], dtype=torch.float32)
        rows.append(training_row(ids_T, mask_R, log_probs_R, advantage))
    return rows


def as_on_gpus(config):
    """The same actor with what the GPU profiles set, but in float32 and without flash-attn."""
    gpu = resolve(compose_plain("solver", ["hardware=single_gpu", "model=qwen2.5-3b"])).actor_rollout_ref
    named = ("use_fused_kernels", "fused_kernel_options", "override_config", "enable_gradient_checkpointing")
    changes = {"model": {name: gpu.model[name] for name in named}}
    changes["actor"] = {"fsdp_config": {"use_no_sync_for_gradient_accumulation": True}}
    assert gpu.actor.use_dynamic_bsz and gpu.model.use_fused_kernels
    assert gpu.model.override_config.attn_implementation == "drzero_packed"
    merged = OmegaConf.to_container(OmegaConf.merge(config, changes))
    return {str(key): value for key, value in merged.items()}


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow("several ranks"))],
    ids="ranks={}".format,
)
def updates(request, tmp_path_factory, smollm2_tokenizer):
    model = save_policy(tmp_path_factory.mktemp("tiny") / "model", smollm2_tokenizer)
    plain = actor_config(model)
    found = {}
    for name, config in {"plain": plain, "as on GPUs": as_on_gpus(plain)}.items():
        losses = {
            method: {"policy_loss": {"rollout_correction": {"loss_type": loss}}}
            for method, loss in METHODS.items()
        }
        cases = {
            (method, batches): {"actor": losses[method], "rows": rows_of(method), **size}
            for method, (batches, size) in product(METHODS, BATCHES.items())
        }
        left = make_steps(tmp_path_factory.mktemp("steps"), config, cases, request.param)
        found |= {(name, *case): update for case, update in left.items()}
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["plain", "as on GPUs"])
@pytest.mark.parametrize("batches", BATCHES)
def test_loss_and_gradients_are_those_of_one_row_at_a_time(updates, name, method, batches):
    expected, found = updates["plain", method, "one row at a time"], updates[name, method, batches]
    assert max(step.abs().max() for step in expected["moved"].values()) > 1e-3
    for weight, step in expected["moved"].items():
        torch.testing.assert_close(
            found["moved"][weight], step, **CLOSE, msg=lambda text, w=weight: f"{w}: {text}"
        )
    for metric in ("loss", "grad_norm"):
        wanted = pytest.approx(np.mean(expected["metrics"][metric]), abs=1e-6)
        assert np.mean(found["metrics"][metric]) == wanted


def test_verl_shards_a_head_that_is_not_tied_alone():
    # When this fails, the key `fused_head` and its refusal by preflight can go.
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for tied in (True, False):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=tied, **sizes))
        alone = _select_fsdp2_wrap_targets(model, ["LlamaDecoderLayer"])
        assert any(module is model.lm_head for module in alone) is not tied
