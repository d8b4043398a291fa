"""veRL's actor worker and FSDP2 engine on the CPU (veRL 0.9.1). Import it after `verl_ext.plugin`.

The worker initializes the process group: veRL would ask for `cpu:gloo,cpu:gloo`, which torch refuses.
"""

import os
from typing import Any

import torch.distributed as dist
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class CpuFSDPEngine(FSDPEngineWithLMHead):
    """FSDP2 over gloo. A reference worker would be offloaded to pinned memory, which needs a GPU."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        if engine_config.forward_only:
            raise ValueError(
                "hardware=cpu has no reference worker: set actor_rollout_ref.actor.use_kl_loss=false and "
                "algorithm.use_kl_in_reward=false (the published challenger uses no KL either)"
            )
        super().__init__(model_config, engine_config, *args, **kwargs)


class CpuActorRolloutRefWorker(ActorRolloutRefWorker):
    """The stock worker with a gloo process group. veRL skips its own if one exists."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            # With torch's TCP store, a lone worker would listen on every interface.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        initialize_global_process_group_ray(backend="gloo")
