"""veRL's keys that this project treats specially. `RESULTS` and `NEVER` are prefixes, the rest whole keys."""

ROOTS = frozenset(
    [
        "actor_rollout_ref",
        "agent_loops",
        "algorithm",
        "critic",
        "custom_reward_function",
        "data",
        "distillation",
        "global_profiler",
        "hydra",
        "mode",
        "model_engine",
        "ray_kwargs",
        "reward",
        "reward_model",
        "sandbox_fusion",
        "search_tool",
        "skip",
        "trainer",
        "transfer_queue",
    ]
)
"""Top-level names that only stages with a trainer have. Other stages ignore them."""

ALIASES = {
    "trainer.n_gpus_per_node": "machine.gpus",
    "trainer.nnodes": "machine.nodes",
    "trainer.device": "machine.device",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
}
"""veRL's keys that follow ours, because stages without veRL need them too. Overriding them sets ours."""

OLD_KEYS = {"watchdog.factor": "watchdog.patience_factor", "compare.least_p": "compare.min_p_value"}
"""Our keys renamed in this release. Old names still work until the next one, with a line that says so."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RENAMED = {
    f"{_ACTOR}.micro_batch_size_per_gpu": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.micro_batch_size_per_gpu": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.micro_batch_size_per_gpu": (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ),
    f"{_ROLLOUT}.multi_turn.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.tp": f"{_ROLLOUT}.tensor_model_parallel_size",
    "flow.patience_s": "watchdog.floor_s",
    "flow.cold_start_s": "watchdog.cold_start_s",
    "flow.tell_every_s": "flow.log_every_s",
}
"""Keys of older releases and of guides to them, which are refused. Nearest-name search would miss these."""

RESULTS = (
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.kl_loss",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.policy_loss.",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.model.lora",
    "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.top_",
    "algorithm.",
    "data.shuffle",
    "data.train_batch_size",
    "data.truncation",
    "reward.custom_reward_function.name",
    "trainer.total_training_steps",
    "trainer.v1.trainer_mode",
)
"""Keys that change a training stage's results. So does any other key on the command line, except:"""

NEVER = (
    *ALIASES,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.rollout.agent.",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_micro",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "compute",
    "data.val_files",
    "debug",
    "env",
    "hardware",
    "hydra.",
    "loop",
    "mode",
    "model",
    "process_env.",
    "ray_kwargs.",
    "reward.num_workers",
    "trainer.logger",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.save_freq",
    "trainer.test_freq",
    "transfer_queue.",
)
"""Keys that decide only where and how fast a stage runs. Inputs are compared by content instead."""

RUN = ("data.train_batch_size",)  # keys that a training run cannot change when it resumes

PACE = (
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)
"""Keys that the time of a training step depends on."""
