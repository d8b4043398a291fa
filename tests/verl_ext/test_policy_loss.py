"""A training step by veRL's worker learns only from rows that count."""

import numpy as np
import pytest
import torch
from actor_steps import CLIP, PROMPT, actor_config, make_rows, make_steps, save_policy
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl_ext.trainer.policy_loss import bypass_mode_loss

ENTROPY, KL = 0.01, 0.1
MOST_WEIGHT = 0.015
"""Between the ratios of these rows, which the sampler found about 80 times as likely as the policy does."""
WEIGHTED = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": MOST_WEIGHT}
LOSSES = {
    "reinforce": {"policy_loss": {"rollout_correction": {"loss_type": "reinforce"}}},
    "ppo_clip": {"policy_loss": {"rollout_correction": {"loss_type": "ppo_clip"}}},
    "reinforce, weighted": {"policy_loss": {"rollout_correction": WEIGHTED}},
    "entropy and KL": {
        "policy_loss": {"rollout_correction": {"loss_type": "reinforce"}},
        "entropy_coeff": ENTROPY,
        "use_kl_loss": True,
        "kl_loss_coef": KL,
        "kl_loss_type": "kl",
    },
}
CASES = {(loss, size): {"actor": LOSSES[loss], "micro_batch": size} for loss in LOSSES for size in (1, 8)}


def reference(model, rows, loss):
    """The gradient by hand: the mean over the tokens of rows that count."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for row in rows:
        if not row["loss_mask"].any():
            continue
        logits_RV = policy(row["input_ids"][None]).logits[0, PROMPT - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits_RV)
        log_prob_R = distribution.log_prob(row["responses"])
        if loss == "ppo_clip":
            ratio_R = (log_prob_R - row["old_log_probs"]).exp()
            clipped_R = ratio_R.clamp(1 - CLIP, 1 + CLIP)
            gain_R = torch.minimum(ratio_R * row["advantages"], clipped_R * row["advantages"])
        else:
            gain_R = log_prob_R * row["advantages"]
        if loss == "reinforce, weighted":
            # The policy's probability over the sampler's, not differentiated, and cut.
            gain_R = gain_R * (log_prob_R - row["old_log_probs"]).exp().detach().clamp(max=MOST_WEIGHT)
        if loss == "entropy and KL":
            gain_R = gain_R + ENTROPY * distribution.entropy() - KL * (log_prob_R - row["ref_log_prob"])
        total, tokens = total - gain_R.sum(), tokens + len(gain_R)
    (total / tokens).backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


@pytest.fixture(
    scope="module",
    params=[1, *(pytest.param(n, marks=pytest.mark.slow("several ranks")) for n in (2, 4))],
    ids="ranks={}".format,
)
def ranks(request):
    return int(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2_tokenizer):
    return save_policy(tmp_path_factory.mktemp("tiny") / "model", smollm2_tokenizer)


@pytest.fixture(scope="module")
def steps(model, ranks, tmp_path_factory):
    cases = {name: {**case, "rows": make_rows()} for name, case in CASES.items()}
    return make_steps(tmp_path_factory.mktemp("steps"), actor_config(model), cases, ranks)


@pytest.fixture(scope="module", params=LOSSES)
def loss(request):
    return str(request.param)


@pytest.fixture(scope="module")
def expected(model, loss):
    return reference(model, make_rows(), loss)


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_spoiled_and_padding_rows_do_not_move_the_weights(steps, loss, expected, micro_batch):
    moved = steps[loss, micro_batch]["moved"]
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(
            moved[name], gradient, rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_its_metrics_are_numbers(steps, loss):
    metrics = steps[loss, 1]["metrics"]
    assert "actor/ppo_kl" in metrics
    assert all(np.isfinite(value).all() for value in metrics.values())


def test_veRLs_own_loss_still_refuses_a_micro_batch_without_a_token():
    row = torch.zeros(1, 3)
    config = OmegaConf.create({"policy_loss": {"rollout_correction": {"loss_type": "reinforce"}}})
    arguments = (row, row, row, torch.zeros(1, 3, dtype=torch.bool), "token-mean", config)
    with pytest.raises(ValueError, match="at least one valid token"):
        get_policy_loss_fn("bypass_mode")(*arguments)
        pytest.fail("veRL takes it now: drop verl_ext/trainer/policy_loss.py and set loss_mode: bypass_mode")
    assert bypass_mode_loss is get_policy_loss_fn("drzero_bypass_mode")
