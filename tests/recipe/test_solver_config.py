"""The solver's config: what veRL makes of it, the published values, and where it gets data and weights."""

import itertools
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verl_ext.plugin  # noqa: F401 - veRL knows our trainers and our rollout engine by it
from drzero.recipe.compose import CONFIG_DIR, compose_stage, resolve
from verl_ext.rewards import solver_score
from verl_ext.trainer.trainers import GRPO

HARDWARE, MODES = (
    sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in ("hardware", "mode")
)


def solver(*overrides):
    """The solver by Hydra alone."""
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return resolve(compose("solver", [*overrides, "retrieval.port=8001", "solver.port=8002"]))


@pytest.mark.parametrize(("hardware", "mode"), itertools.product(HARDWARE, MODES))
def test_a_combination_is_accepted_by_verls_own_dataclasses_and_validation(hardware, mode):
    config = solver(f"hardware={hardware}", f"mode={mode}")
    for node in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"):
        assert omega_conf_to_dataclass(OmegaConf.select(config, node)) is not None, node
    validate_config(config, use_reference_policy=False, use_critic=False)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
    assert (trainer.method, trainer.base_mode) == (GRPO, mode)


@pytest.fixture(scope="module")
def published():
    """The solver as a user gets it on the paper's machine."""
    return resolve(compose_stage("solver", ["hardware=8xh100", "retrieval.port=8001", "solver.port=8002"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.rollout.n", 5),
        # Without a solver's server its engine has the share of both.
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5),
        ("actor_rollout_ref.actor.clip_ratio", 0.2),
        ("actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type", "ppo_clip"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "drzero_bypass_mode"),
        ("algorithm.rollout_correction.bypass_mode", True),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 0),
        ("actor_rollout_ref.rollout.val_kwargs.n", 1),
        ("actor_rollout_ref.rollout.temperature", 1.0),
        ("data.max_prompt_length", 512),
        ("data.max_response_length", 2560),
        ("data.train_batch_size", 256),
        ("trainer.total_training_steps", 50),
        ("trainer.val_before_train", True),
        ("run.name", "solver_iter1"),
    ],
)
def test_a_published_value_is_in_the_group_a_user_would_open(published, key, value):
    assert OmegaConf.select(published, key) == value


@pytest.mark.parametrize(("advantage", "clipped"), [(1.0, -1.1), (-1.0, 0.9)])
def test_the_ratio_is_clipped_where_the_config_says(advantage, clipped):
    actor = omega_conf_to_dataclass(
        solver("hardware=8xh100", "actor_rollout_ref.actor.clip_ratio=0.1").actor_rollout_ref.actor
    )
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=1, global_batch_size=1)
    one = torch.ones(1, 1)
    # Far beyond on the side on which it gains nothing.
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        **{"old_log_prob": 0 * one, "log_prob": advantage * one / 2, "advantages": advantage * one},
        **{"response_mask": one.bool(), "loss_agg_mode": actor.loss_agg_mode, "config": actor},
    )
    assert loss.item() == pytest.approx(clipped)


def test_veRL_loads_our_reward(published):
    assert get_custom_reward_fn(published).args[0] is solver_score  # type: ignore[attr-defined]


def test_a_small_model_keeps_its_own_lengths():
    assert solver("hardware=cpu").data.max_response_length == 960


@pytest.mark.parametrize(
    ("iteration", "model"), [(1, "base"), (2, "solver_iter1_hf"), (3, "solver_iter2_hf")]
)
def test_an_iteration_takes_its_own_questions_and_the_last_solvers_weights(iteration, model):
    config = solver(f"iteration={iteration}", "base_model=x/base", "paths.checkpoints=/c")
    assert Path(config.actor_rollout_ref.model.path).name == model
    assert config.data.train_files == f"/c/synthesize_iter{iteration}/train.parquet"
    assert config.data.val_files == f"/c/synthesize_iter{iteration}/val.parquet"
    assert config.trainer.total_training_steps == 50
