"""veRL's own keys that this project treats in a special way; the others are veRL's alone.

`RESULTS` and `NEVER` are beginnings of dotted keys, the others whole keys.
"""

ROOTS = frozenset(
    {
        *("actor_rollout_ref", "algorithm", "critic", "data", "distillation", "global_profiler", "hydra"),
        *("mode", "model_engine", "ray_kwargs", "reward", "reward_model", "custom_reward_function"),
        *("sandbox_fusion", "skip", "trainer", "transfer_queue", "search_tool", "agent_loops"),
    }
)
"""The nodes, and the group, of stages with a trainer alone, with the two files that veRL loads by path.

Stages without one ignore overrides of them: a loop or a launch gives the same overrides to all of its stages.
"""

ALIASES = {
    "trainer.n_gpus_per_node": "machine.gpus",
    "trainer.nnodes": "machine.nodes",
    "trainer.device": "machine.device",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
}
"""veRL's keys that take their value from ours, because stages without veRL need it too; overrides of them set
ours."""

RESULTS = (
    *("data.train_batch_size", "data.shuffle", "data.truncation", "algorithm."),
    *("trainer.total_training_steps", "trainer.v1.trainer_mode", "reward.custom_reward_function.name"),
    *("actor_rollout_ref.actor.optim.", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    *("actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.actor.clip_ratio"),
    *("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.loss_agg_mode"),
    *("actor_rollout_ref.actor.entropy_coeff", "actor_rollout_ref.actor.use_kl_loss"),
    *("actor_rollout_ref.actor.kl_loss", "actor_rollout_ref.actor.policy_loss."),
    *("actor_rollout_ref.model.lora", "actor_rollout_ref.rollout.n"),
    *("actor_rollout_ref.rollout.top_", "actor_rollout_ref.rollout.multi_turn."),
)
"""What changes the results of a training stage. So does any other key that the command line sets, except:"""

NEVER = (
    *ALIASES,
    *("hydra.", "process_env.", "hardware", "model", "mode", "loop", "compute", "debug", "env"),
    *("ray_kwargs.", "transfer_queue.", "data.val_files", "reward.num_workers"),
    *("trainer.logger", "trainer.save_freq", "trainer.test_freq", "trainer.max_actor_ckpt_to_keep"),
    *("actor_rollout_ref.rollout.multi_turn.tool_config_path", "actor_rollout_ref.rollout.agent."),
    *("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro"),
    *("actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.rollout.name"),
    *("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "actor_rollout_ref.rollout.engine_kwargs."),
    *("actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.max_num_seqs"),
    *("actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.nnodes"),
    *("actor_rollout_ref.rollout.n_gpus_per_node", "actor_rollout_ref.model.enable_gradient_checkpointing"),
)
"""Where and how fast a training stage runs: no results change with these. Inputs are compared by content."""

RUN = ("data.train_batch_size",)
"""What a training run keeps for life."""

PACE = (
    *("data.train_batch_size", "actor_rollout_ref.rollout.n"),
    *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device"),
)
"""What the time of a training step depends on."""
