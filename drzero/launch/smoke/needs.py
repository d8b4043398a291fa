"""The mechanisms a training run needs from its machine, and a verdict on one of them."""

from dataclasses import dataclass

from omegaconf import DictConfig

from drzero.preflight.memory_ledger import actor_state
from drzero.preflight.model_shape import load_shape


@dataclass(frozen=True)
class Needs:
    """The ways a machine can fail a challenger's run."""

    has_gpus: bool
    ranks: int
    sglang: bool  # Whether SGLang samples. Weights then go from process to process on each GPU.
    schedulers: dict[int, int]  # SGLang's processes by tensor-parallel rank, rollout and solver together
    sleeps: bool
    share: float
    offloads: bool  # Whether weights and Adam states wait in host memory
    weights_gib: float | None  # each rank's part of the trained model, or None if its sizes are unknown
    flash_attention: bool
    dummy_weights: bool
    """Whether the rollout engine starts with random weights, which only a sync can replace."""
    shared_memory: int  # bytes of Ray's object store in /dev/shm


@dataclass(frozen=True)
class Verdict:
    """One line of the smoke test."""

    mechanism: str
    proven: bool
    why: str
    needed: bool = True

    @property
    def fails(self) -> bool:
        """Whether it fails the smoke test."""
        return self.needed and not self.proven

    def __str__(self) -> str:
        spared = "" if self.proven or self.needed else " (the run does without it)"
        return f"{'proven' if self.proven else 'not proven':<12}{self.mechanism}: {self.why}{spared}"


def needs_of(config: DictConfig) -> Needs:
    """The needs of a run with this config."""
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
