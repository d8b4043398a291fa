"""Every key in which 8×H100 differs from the CPU rehearsal, and the test that drives it.

A new key in the profile fails here until it is listed.
"""

import re
from pathlib import Path

from omegaconf import OmegaConf

from drzero.ops.versions import pinned
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.overrides import leaf_values

_PATH, _UPDATE = "rehearsal/test_gpu_path.py", "verl_ext/test_gpu_update.py"
DRIVEN = {
    (_PATH, "test_verl_accepts_the_config_and_makes_the_trainer_of_the_stage"): (
        "machine.device machine.gpus trainer.device trainer.n_gpus_per_node data.train_batch_size "
        # Neither of the two is created.
        "critic.ppo_mini_batch_size distillation.teacher_models.teacher_model.inference.dtype"
    ),
    (_PATH, "test_weights_and_optimizer_come_to_the_gpu_for_a_step_and_leave_it"): (
        "actor_rollout_ref.actor.fsdp_config.param_offload "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    ),
    (_PATH, "test_it_computes_in_bfloat16_over_weights_in_float32_with_flash_attention"): (
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile"
    ),
    (_UPDATE, "test_the_packed_bfloat16_update_moves_weights_alike"): (
        "actor_rollout_ref.model.override_config actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    ("verl_ext/test_update_batches.py", "test_loss_and_gradients_are_those_of_one_row_at_a_time"): (
        "actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.rollout.log_prob_use_dynamic_bsz "
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz critic.use_dynamic_bsz "
        "actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.actor.use_fused_kernels"
    ),
    (_PATH, "test_optimizer_batches_and_checkpoints_are_those_of_the_config"): (
        "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu "
        "steps_per_iteration trainer.total_training_steps"
    ),
    (_PATH, "test_sglang_accepts_what_verl_gives_the_rollout_engine"): (
        "actor_rollout_ref.rollout.n_gpus_per_node actor_rollout_ref.rollout.dtype "
        "actor_rollout_ref.rollout.max_num_seqs"
    ),
    (_PATH, "test_sglang_accepts_the_command_line_of_the_solvers_server"): (
        "solver.dp_size solver.mem_fraction_static solver.dtype"
    ),
    ("verl_ext/test_ray.py", "test_verl_gets_its_placement_group_and_a_few_cpus_are_left"): (
        "ray_kwargs.ray_init.num_cpus transfer_queue.backend.SimpleStorage.num_data_storage_units"
    ),
    (
        "recipe/test_compose.py",
        "test_reward_workers_are_as_many_as_a_steps_attempts_need_and_share_the_solver",
    ): (
        "reward.num_workers reward.custom_reward_function.reward_kwargs.solver.concurrency solver.concurrency"
    ),
    ("preflight/test_memory_ledger.py", "test_encoders_take_turns_on_the_gpus"): "retrieval.encoders",
}
AMOUNTS = (
    "actor_rollout_ref.rollout.agent.num_workers retrieval.cache_mb retrieval.max_batch retrieval.threads "
    "ray_kwargs.ray_init.object_store_memory run.min_free_gb trainer.max_actor_ckpt_to_keep "
    "trainer.save_freq watchdog.patience_factor"
)
"""These differ from hardware=cpu only in amount."""
ELSEWHERE = {
    "machine.gpu": "the name of the GPU, for preflight alone",
    "retrieval.device": "an embedder in CUDA's memory",
    "solver.max_batch_size": "SGLang on CUDA takes as many as fit",
}
"""No test of the suite can drive these."""


def test_every_key_that_differs_on_gpus_is_listed():
    def keys(*hardware):
        overrides = [*hardware, "model=qwen2.5-7b", "fused_head=true"]
        overrides += ["solver.port=8001", "retrieval.port=8000"]
        config = resolve(compose_stage("challenger", overrides))  # the solver's are mostly the same
        return dict(leaf_values("", OmegaConf.to_container(config)))

    here, gpus = keys("hardware=cpu", "rollout=sglang"), keys("hardware=8xh100")
    differ = {key for key, value in gpus.items() if key not in here or here[key] != value}
    assert differ == {*" ".join((*DRIVEN.values(), AMOUNTS)).split(), *ELSEWHERE}


def test_the_listed_tests_exist():
    here = Path(__file__).parents[1]
    for file, name in DRIVEN:
        assert re.search(rf"^def {name}\(", (here / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_the_flash_attn_stand_in_has_the_pinned_version():
    folder = f"flash_attn-{pinned('flash-attn', gpu=True)}.dist-info"
    assert (Path(__file__).parents[1] / "rehearsal" / "flash_attn_stand_in" / folder / "METADATA").is_file()
