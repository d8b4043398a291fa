"""Checks of a local Ray: CPUs for veRL's placement group, and an object store that fits /dev/shm."""

import os
import shutil
from collections.abc import Iterator

from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, warning
from drzero.preflight.memory_ledger import width
from drzero.recipe.compose import cpus_reserved, joins_cluster

_CPUS, _STORE = "ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.object_store_memory"
_SIZES = "the run joins a Ray cluster of your own, whose size it cannot set"
_SHM = "/dev/shm"
_RAY_INSISTS = 10**10
"""From this size on, Ray refuses an object store that exceeds /dev/shm (REQUIRE_SHM_SIZE_THRESHOLD)."""


def check_cpus(ctx: CheckContext) -> Iterator[Finding]:
    """Ray must count the CPUs that veRL reserves, or the trainer waits forever without a word."""
    counted, needed = ctx.config.ray_kwargs.ray_init.num_cpus, cpus_reserved(ctx.config)
    if joins_cluster(ctx.config):
        if counted is not None:
            yield error(_CPUS, _SIZES, f"set {_CPUS}=null")
        return
    if counted is None and ctx.starting:
        counted = os.cpu_count()
    if counted is None or counted >= needed:
        return
    why = f"Ray would count {counted} CPUs, and veRL waits for ever for the {needed} that it reserves"
    yield error(_CPUS, why, "leave it as it is in the recipe: these CPUs are logical")


def check_object_store(ctx: CheckContext) -> Iterator[Finding]:
    """Ray's object store must fit /dev/shm and hold the weights that pass through it."""
    config, wanted = ctx.config, ctx.config.ray_kwargs.ray_init.get("object_store_memory")
    if wanted is None:
        return
    if joins_cluster(config):
        yield error(_STORE, _SIZES, f"set {_STORE}=null, and --object-store-memory of `ray start`")
        return
    rollout, shape = config.actor_rollout_ref.rollout, ctx.shape(config.actor_rollout_ref.model.path)
    weights = config.trainer.n_gpus_per_node * width(rollout.dtype) * shape.parameters if shape else 0
    if rollout.name == "reference" and weights > wanted:
        size = f"{weights / 1e9:.1f} GB"
        why = f"the reference engines' weights ({size}) pass through it: Ray would use the disk for the rest"
        yield warning(_STORE, why, f"set it to {weights * 5 // 4} or more")
    room = shm_free()
    if not ctx.machine.is_here or wanted <= room:
        return
    why = f"{_SHM} has {room / 1e9:.1f} GB free for Ray's object store of {wanted / 1e9:.1f} GB"
    fix = f"enlarge it (docker run --shm-size), empty it, or set {_STORE}"
    if wanted > _RAY_INSISTS:
        yield error(_STORE, f"{why}: Ray refuses to start", fix)
    else:
        yield warning(_STORE, f"{why}: Ray would use the disk, and NCCL may find no room either", fix)


def shm_free() -> int:
    """Free bytes in /dev/shm; 0 without one."""
    return shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else 0
