"""Which mechanisms a training run needs of its machine, by its resolved config."""

from dataclasses import dataclass

from omegaconf import DictConfig

from drzero.preflight.memory_ledger import actor_state
from drzero.preflight.model_shape import load_shape


@dataclass(frozen=True)
class Needs:
    """A challenger's run, as far as its machine can fail it."""

    has_gpus: bool
    ranks: int
    """Processes that train, one a GPU."""
    sglang: bool
    """Whether SGLang samples, so that weights go from process to process on each GPU."""
    schedulers: dict[int, int]
    """By tensor-parallel rank, how many processes SGLang's engines have, the rollout's and the solver's."""
    sleeps: bool
    """Whether the rollout engine gives its memory back for the update."""
    share: float
    """Of the memory that is free, the rollout engine's."""
    offloads: bool
    """Whether weights and Adam states wait in host memory."""
    weights_gib: float | None
    """Each rank's part of the trained model; None if the model's sizes are not known."""
    flash_attention: bool
    dummy_weights: bool
    """Whether the rollout engine starts with random weights, so that all of its weights come by the sync."""
    shared_memory: int
    """Bytes of Ray's object store in /dev/shm."""


def needs_of(config: DictConfig) -> Needs:
    """What the run of this config needs."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    rollout, solver, gpus = config.actor_rollout_ref.rollout, config.solver, config.machine.gpus
    sglang = rollout.name == "sglang"
    schedulers: dict[int, int] = {}
    tp = rollout.tensor_model_parallel_size
    for rank in range(tp if sglang else 0):
        schedulers[rank] = gpus // tp
    for rank in range(solver.tp_size if solver.engine == "sglang" else 0):
        schedulers[rank] = schedulers.get(rank, 0) + solver.dp_size
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    own = rollout.engine_kwargs.get("sglang") or {}
    shape = load_shape(model.path)
    return Needs(
        has_gpus=config.machine.device != "cpu",
        ranks=gpus,
        sglang=sglang,
        schedulers=schedulers,
        sleeps=sglang and rollout.free_cache_engine and own.get("enable_memory_saver", True),
        share=rollout.gpu_memory_utilization,
        offloads=actor.fsdp_config.param_offload and actor.fsdp_config.optimizer_offload,
        weights_gib=actor_state(config, shape, gpus)["actor: weights"] if shape else None,
        flash_attention=attention == "flash_attention_2",
        dummy_weights=rollout.load_format == "dummy",
        shared_memory=config.ray_kwargs.ray_init.get("object_store_memory") or 0,
    )
