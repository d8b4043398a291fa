"""The recipe's configs: every combination is what veRL takes, and published values are in place."""

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verl_ext.plugin  # noqa: F401 - veRL knows our trainers and our rollout engine by it
from drzero.loop.plan import compose_loop, plan_loop
from drzero.preflight.run import preflight
from drzero.recipe.compose import (
    CONFIG_DIR,
    RESOLVED,
    compose_plain,
    compose_stage,
    detect_hardware,
    resolve,
    write_resolved,
)
from drzero.recipe.overrides import PLAIN_MODEL, OverrideError, leaf_values
from verl_ext.rewards import challenger_score, solver_score
from verl_ext.trainer.trainers import GRPO, HRPO

METHODS = {"challenger": HRPO, "solver": GRPO}
PORTS = ("retrieval.port=8001", "solver.port=8002")
MODELS, HARDWARE, MODES = (
    sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    for group in ("model", "hardware", "mode")
)
# The nodes that veRL 0.9.1 itself makes into dataclasses for a run like ours. Of `reward`, `distillation` and
# `global_profiler` it reads single keys; its own defaults for them cannot be made whole.
DATACLASS_NODES = [
    *map("actor_rollout_ref.{}".format, ("actor", "rollout")),
    "algorithm",
    "reward.sandbox_fusion",
]
second_tier = pytest.mark.slow("two options at once; the first tier changes them one by one")


def each_option_once(stage, *options):
    """All combinations; in the first tier those that differ from the published one in a single option."""
    published = ("qwen2.5-3b", "8xh100", "sync")
    for chosen in itertools.product(*options):
        others = sum(option != own for option, own in zip(chosen, published, strict=False))
        yield pytest.param(stage, *chosen, marks=[second_tier] if others > 1 else [])


def combination(stage, hardware, mode="sync", *overrides):
    """By Hydra alone: `compose_stage` judges the overrides first and takes longer."""
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return resolve(compose(stage, [f"hardware={hardware}", f"mode={mode}", *PORTS, *overrides]))


@functools.cache
def published(stage):
    """The stage as a user gets it on the paper's machine."""
    return resolve(compose_stage(stage, ["hardware=8xh100", *PORTS]))


@pytest.mark.parametrize(
    ("stage", "model", "hardware", "mode"),
    [
        *each_option_once("challenger", MODELS, HARDWARE, MODES),
        *itertools.product(["solver"], [None], HARDWARE, MODES),
    ],
)
def test_a_combination_is_accepted_by_verls_own_dataclasses_and_validation(stage, model, hardware, mode):
    config = combination(stage, hardware, mode, *([f"model={model}"] if model else []))
    for node in DATACLASS_NODES:
        assert omega_conf_to_dataclass(OmegaConf.select(config, node)) is not None, node
    validate_config(config, use_reference_policy=False, use_critic=False)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
    assert (trainer.method, trainer.base_mode) == (METHODS[stage], mode)


def test_veRL_loads_our_rewards_and_their_manager():
    reward = get_custom_reward_fn(published("challenger"))
    assert isinstance(reward, functools.partial) and reward.args[0] is challenger_score
    assert set(reward.args[1]) == {"attempts", "solver", "open_book_check", "hop_check"}
    assert resolve_reward_manager_cls(published("challenger")) is not None
    assert get_custom_reward_fn(published("solver")).args[0] is solver_score


@pytest.mark.parametrize(("stage", "model", "hardware"), each_option_once("challenger", MODELS, HARDWARE))
def test_a_model_loads_as_verls_model_config_and_a_whole_conversation_fits_the_engines(
    tiny_model, stage, model, hardware
):
    config = combination(stage, hardware, "sync", f"model={model}", f"base_model={tiny_model}")
    loaded = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert config.solver.model_path == str(tiny_model)
    data, rollout = config.data, config.actor_rollout_ref.rollout
    # One more: SGLang keeps a position for itself.
    assert rollout.max_model_len == data.max_prompt_length + data.max_response_length + 1
    assert rollout.multi_turn.max_tool_response_length > config.retrieval.response_limit
    assert config.rollout.max_tokens_per_turn <= data.max_response_length


PUBLISHED = {
    "challenger": """
data: {train_batch_size: 256, max_prompt_length: 1536, max_response_length: 2560}
actor_rollout_ref:
  actor:
    optim: {lr: 1.0e-6, optimizer: AdamW, betas: [0.9, 0.999], weight_decay: 0.01, clip_grad: 0.1}
    optim.lr_warmup_steps_ratio: 0.03
    optim.lr_scheduler_type: constant
    grad_clip: 0.1
    clip_ratio: 0.2
    ppo_mini_batch_size: 256
    ppo_max_token_len_per_gpu: 16384
    ppo_epochs: 1
    use_kl_loss: false
    entropy_coeff: 0
    loss_agg_mode: token-mean
  rollout: {name: sglang, n: 1, temperature: 1.0, gpu_memory_utilization: 0.25}
  rollout.log_prob_max_token_len_per_gpu: 16384
  rollout.multi_turn.max_assistant_turns: 5
algorithm: {use_kl_in_reward: false}
solver: {attempts: 5, mem_fraction_static: 0.25, temperature: 1.0}
reward.custom_reward_function.reward_kwargs.attempts: 5
retrieval: {topk: 3, response_limit: 2048, embedder: intfloat/e5-large-v2}
trainer: {n_gpus_per_node: 8, total_training_steps: 50, resume_mode: auto}
""",
    # Without a solver's server its engine has the share of both.
    "solver": """
actor_rollout_ref:
  rollout: {n: 5, gpu_memory_utilization: 0.5, temperature: 1.0, val_kwargs: {temperature: 0, n: 1}}
  actor: {clip_ratio: 0.2}
  actor.policy_loss: {rollout_correction: {loss_type: ppo_clip}, loss_mode: drzero_bypass_mode}
algorithm.rollout_correction.bypass_mode: true
data: {max_prompt_length: 512, max_response_length: 2560, train_batch_size: 256}
trainer: {total_training_steps: 50, val_before_train: true}
run: {name: solver_iter1}
""",
}


@pytest.mark.parametrize("stage", PUBLISHED)
def test_published_values_are_in_the_groups_a_user_would_open(stage):
    values = dict(leaf_values("", yaml.safe_load(PUBLISHED[stage])))
    assert {key: OmegaConf.select(published(stage), key) for key in values} == values


@pytest.mark.parametrize(
    ("overrides", "copies", "each"),
    [
        ([], 8, 1),
        (["solver.tp_size=2"], 4, 2),  # the paper's
        (["model=qwen3-14b"], 2, 4),
        (["solver.tp_size=2", "machine.gpus=4"], 2, 2),
    ],
)
def test_both_engines_have_as_many_copies_as_the_gpus_hold(overrides, copies, each):
    config = resolve(compose_plain("challenger", ["hardware=8xh100", *overrides]))
    rollout, gpus = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    assert (config.solver.dp_size, config.solver.tp_size) == (copies, each)
    # veRL makes a replica of each group of this many.
    assert (gpus // rollout.tensor_model_parallel_size, rollout.tensor_model_parallel_size) == (copies, each)


@pytest.mark.parametrize("hardware", ["8xh100", "cpu", "single_gpu"])
def test_ray_leaves_no_profile_waiting_slowed_or_with_a_third_of_the_memory(hardware):
    config = combination("challenger", hardware)
    ray = config.ray_kwargs.ray_init
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    # That veRL reserves so many, and no more, is seen by test_ray.py.
    assert ray.num_cpus == 3 * config.machine.gpus + 1 + units + 4
    assert 0 < ray.object_store_memory < 10**10
    assert config.process_env["RAY_worker_niceness"] == 0


def test_gpus_that_only_sample_have_cpus_and_a_cluster_of_machines_counts_its_own():
    sampling = [f"actor_rollout_ref.rollout.{key}" for key in ("nnodes=1", "n_gpus_per_node=4")]
    own, separate, cluster = (
        combination("challenger", "8xh100", mode, *overrides).ray_kwargs.ray_init.num_cpus
        for mode, overrides in (("sync", []), ("separate_async", sampling), ("sync", ["machine.nodes=2"]))
    )
    assert (separate, cluster) == (own + 2 * 4, None)


@pytest.mark.parametrize(
    ("hardware", "overrides", "workers"),
    [("8xh100", (), 8), ("cpu", (), 1), ("single_gpu", (), 2), ("8xh100", ("reward.num_workers=4",), 4)],
)
def test_reward_workers_are_as_many_as_a_steps_attempts_need_and_share_the_solver(
    hardware, overrides, workers
):
    config = combination("challenger", hardware, "sync", "model=qwen2.5-3b", *overrides)
    each = config.reward.custom_reward_function.reward_kwargs.solver.concurrency
    assert config.reward.num_workers == workers
    assert config.solver.concurrency <= workers * each < config.solver.concurrency + workers


def test_the_optimizer_veRL_makes_warms_up_and_stays_constant():
    optim = omega_conf_to_dataclass(published("challenger").actor_rollout_ref.actor).optim
    assert (optim.lr_warmup_steps_ratio, optim.lr_scheduler_type) == (0.03, "constant")
    # Absolute warm-up steps would win over the ratio.
    assert optim.lr_warmup_steps in (None, -1, 0)


@pytest.mark.parametrize(("advantage", "clipped"), [(1.0, -1.1), (-1.0, 0.9)])
def test_the_solvers_ratio_is_clipped_where_the_config_says(advantage, clipped):
    config = combination("solver", "8xh100", "sync", "actor_rollout_ref.actor.clip_ratio=0.1")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=1, global_batch_size=1)
    one = torch.ones(1, 1)
    # Far beyond on the side on which it gains nothing.
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        **{"old_log_prob": 0 * one, "log_prob": advantage * one / 2, "advantages": advantage * one},
        **{"response_mask": one.bool(), "loss_agg_mode": actor.loss_agg_mode, "config": actor},
    )
    assert loss.item() == pytest.approx(clipped)


@pytest.mark.parametrize(
    ("iteration", "model"), [(1, "base"), (2, "solver_iter1_hf"), (3, "solver_iter2_hf")]
)
def test_an_iteration_takes_its_own_questions_and_the_last_solvers_weights(iteration, model):
    words = [f"iteration={iteration}", "base_model=x/base", "paths.checkpoints=/c"]
    config = combination("solver", "8xh100", "sync", *words)
    assert Path(config.actor_rollout_ref.model.path).name == model
    assert config.data.train_files == f"/c/synthesize_iter{iteration}/train.parquet"
    assert config.data.val_files == f"/c/synthesize_iter{iteration}/val.parquet"
    assert config.trainer.total_training_steps == 50


def test_a_small_model_keeps_its_own_lengths():
    assert combination("solver", "cpu").data.max_response_length == 960


def test_a_key_added_with_plus_is_in_the_resolved_file(tmp_path):
    overrides = ["hardware=cpu", "trainer.total_training_steps=2", "+trainer.foo=1", f"run.dir={tmp_path}"]
    config = compose_stage("challenger", overrides)
    written = OmegaConf.load(write_resolved(resolve(config)))
    assert (written.trainer.foo, written.trainer.total_training_steps) == (1, 2)


@pytest.mark.parametrize(
    ("stage", "override", "expected"),
    [
        ("evaluate", "data.train_file=my.parquet", "'data.train_files'"),
        ("evaluate", "trainer.save_frek=1", "'trainer.save_freq'"),
        ("evaluate", "mode=synk", "'sync'"),
        ("challenger", "trainer={nnodes: 2}", "takes its value from 'machine.nodes'"),
        ("challenger", "actor_rollout_ref.rollout={temperature: 0.3}", "value from 'rollout.temperature'"),
    ],
)
def test_a_stage_refuses_what_veRL_has_not_and_what_veRL_takes_from_our_keys(stage, override, expected):
    """The loop gives all stages the same overrides, so those of veRL's keys pass here; mistakes do not."""
    assert compose_stage("evaluate", ["hardware=cpu", "trainer.save_freq=1"])
    with pytest.raises(OverrideError, match=expected):
        compose_stage(stage, ["hardware=cpu", override])


@pytest.mark.parametrize(
    ("gpus", "hardware"),
    [(None, "cpu"), (0, "cpu"), (1, "single_gpu"), (4, "single_gpu"), (8, "8xh100"), (16, "8xh100")],
)
def test_hardware_is_what_nvidia_smi_lists_unless_it_is_said(tmp_path, monkeypatch, gpus, hardware):
    if gpus is not None:
        listing = "\n".join(f"echo 'GPU {number}: H100 (UUID: x)'" for number in range(gpus))
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{listing}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}" if gpus is not None else "")
    assert detect_hardware() == hardware
    if gpus == 8:
        assert compose_stage("challenger", []).trainer.n_gpus_per_node == 8
        assert compose_stage("challenger", ["hardware=cpu"]).trainer.device == "cpu"


@pytest.mark.parametrize("order", [["hardware=cpu", "model=qwen3-8b"], ["model=qwen3-8b", "hardware=cpu"]])
def test_a_model_that_is_said_wins_over_the_hardwares_default(order):
    assert compose_stage("challenger", order).actor_rollout_ref.model.path == "Qwen/Qwen3-8B"


def test_a_model_is_named_by_its_hub_id_with_the_usual_prompts_and_turns_or_those_of_its_option():
    for stage in ("challenger", "evaluate"):
        config = compose_stage(stage, ["hardware=cpu", "iteration=0", "model=Qwen/Qwen2.5-1.5B-Instruct"])
        assert config.base_model == "Qwen/Qwen2.5-1.5B-Instruct"
        assert (config.prompts.form, config.rollout.max_tokens_per_turn) == ("full", 1024)
    config = compose_stage("challenger", ["hardware=single_gpu", "model=Qwen/Qwen3-8B"])
    assert config == compose_stage("challenger", ["hardware=single_gpu", "model=qwen3-8b"])
    assert set(OmegaConf.load(CONFIG_DIR / "model" / f"{PLAIN_MODEL}.yaml")) == {"base_model"}


def test_a_model_is_named_by_its_folder_from_wherever_it_is(tmp_path, monkeypatch):
    (tmp_path / "models" / "it's mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for start in ("./", "", "~/", f"{tmp_path}/"):
        config = compose_stage("evaluate", ["hardware=cpu", f"model={start}models/it's mine"])
        assert config.base_model == str(tmp_path / "models" / "it's mine")


def test_in_a_loop_a_model_by_name_is_every_stages():
    runs = plan_loop(compose_loop(["loop=demo", "model=org/policy"]))
    models = {compose_stage(run.stage, list(run.overrides)).base_model for run in runs}
    assert models == {"org/policy"}


@pytest.mark.parametrize(
    ("stage", "key", "words"),
    [
        ("challenger", "process_env.NCCL_DEBUG", ["hardware=8xh100"]),
        ("evaluate", "process_env.NCCL_DEBUG", []),
        ("train", "environment.options.turns", ["env=wordle"]),
        ("agent_bench", "agent_options.turns", []),
    ],
)
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_mapping_for_keys_of_the_users_own_takes_them_with_and_without_a_sign(stage, key, words, sign):
    assert OmegaConf.select(compose_stage(stage, [*words, f"{sign}{key}=4"]), key) == 4


@pytest.mark.parametrize("words", [[], ["model=qwen2.5-3b"], ["model=me/mine"], ["env=demo"]])
@pytest.mark.parametrize("hardware", ["cpu", "single_gpu"])
def test_what_prepare_data_makes_is_what_the_challenger_of_the_same_words_reads(words, hardware):
    made, read = (
        compose_stage(stage, [f"hardware={hardware}", *words]) for stage in ("prepare_data", "challenger")
    )
    for key in ("hop_ratio", "prompts.form", "rollout.max_turns", "retrieval.embedder", "base_model"):
        assert OmegaConf.select(made, key) == OmegaConf.select(read, key), key
    if words and "env=demo" not in words:
        assert (made.prompts.form, made.retrieval.embedder) == ("full", "intfloat/e5-large-v2")


def test_the_cpu_profile_defaults_to_the_demo_policy_and_paths_come_out_absolute():
    config = resolve(compose_stage("challenger", ["hardware=cpu", "paths.corpus=a", "paths.checkpoints=b"]))
    assert config.actor_rollout_ref.model.path.endswith("models/demo-policy")
    assert config.prompts.form == "short"
    assert config.data.train_files == os.path.abspath("a/data/zero_ratio11.parquet")
    assert config.run.dir == os.path.abspath("b/challenger_iter1")
    assert Path(published("challenger").data.train_files).name == "zero_ratio4321.parquet"


def test_no_secret_of_the_environment_is_in_what_is_written(tmp_path, monkeypatch):
    secrets = {
        "WANDB_API_KEY": "wandb-secret-0123",
        "HF_TOKEN": "hf_secret0123",
        "MODAL_TOKEN_SECRET": "as-x9",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    write_resolved(resolve(compose_stage("challenger", ["hardware=cpu", f"run.dir={tmp_path}"])))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert (tmp_path / f"{RESOLVED}.yaml").is_file()
    assert not [name for name, value in secrets.items() if value in written]


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_an_asynchronous_challenger_must_be_asked_for_twice(mode):
    refused, allowed = (
        " ".join(
            one.fix
            for one in preflight(combination("challenger", "8xh100", mode, *more), "challenger").errors
        )
        for more in ([], ["allow_off_policy=true"])
    )
    assert "allow_off_policy=true" in refused and "allow_off_policy=true" not in allowed
