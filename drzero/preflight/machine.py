"""The machine that a config declares. Preflight checks against it, wherever it runs."""

import re
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from drzero.ops.resources.cgroup import memory_free, memory_limit
from drzero.ops.resources.gpu import Gpus, GpuSample, gpus_here
from drzero.ops.text import did_you_mean
from drzero.preflight.finding import refusal
from drzero.recipe.gpu_prices import GPUS, GpuType, usd_per_hour

BF16_CAPABILITY = (8, 0)
"""The CUDA compute capability from which a GPU has bfloat16: Ampere's."""


@dataclass(frozen=True)
class Machine:
    """The machines of a run."""

    is_local: bool  # Whether it is the user's machine, not the provider's
    is_here: bool  # Whether preflight may be running on it
    gpu: GpuType | None
    gpus: int
    nodes: int
    host_gib: float | None
    usd_per_hour: float = 0.0
    free_gib: float | None = None
    """What other programs leave of `host_gib` now. None if the machine may not be this one."""

    def __str__(self) -> str:
        gpus = f"{self.gpus} × {self.gpu.name}" if self.gpu else "no GPU"
        nodes = f"{self.nodes} machines with {gpus}" if self.nodes > 1 else gpus
        return f"{nodes}, {'this machine or one like it' if self.is_local else 'Modal'}"


def declared_machine(config: DictConfig, *, starting: bool) -> Machine:
    """The machine of a resolved config. Raises PreflightFailed for an unknown GPU type."""
    compute, declared = config.compute, config.machine
    is_local = compute.provider == "local"
    host_gib = compute.memory / 1024 if compute.memory else None
    hired = known_gpu("compute.type", compute.type)
    price, free_gib = 0.0, None
    if not is_local or hired:
        one = usd_per_hour(hired, compute.count or 0, compute.cpu or 0, host_gib or 0.0, compute.region)
        price = declared.nodes * one
    if is_local:
        uses_gpus = declared.device != "cpu"
        gpus = declared.gpus if uses_gpus else 0
        is_here = starting or gpus_here() >= gpus
        found = gpu_of_this_machine() if uses_gpus and is_here and not hired else None
        gpu = (hired or found or known_gpu("machine.gpu", declared.gpu)) if uses_gpus else None
        if host_gib is None and is_here:
            host_gib, free_gib = memory_limit() / 2**30, memory_free() / 2**30
    else:
        gpu, gpus, is_here = hired, compute.count or 0, starting
    return Machine(is_local, is_here, gpu, gpus if gpu else 0, declared.nodes, host_gib, price, free_gib)


def gpu_of_this_machine() -> GpuType | None:
    """The smallest GPU here with the memory it has, or None if the driver does not say."""
    found = Gpus().read()
    return min(map(_gpu_like, found), key=lambda gpu: gpu.memory_gib, default=None)


def _gpu_like(found: GpuSample) -> GpuType:
    """The GPU type of a driver's name and memory. An unknown one is counted as an H100 of that memory."""
    memory_gib = found.total_mb / 1024
    # 'NVIDIA A100-SXM4-80GB' is like A100-40GB too, and the memory decides.
    words = {*re.split("[ -]", found.name), "40GB", "80GB"}
    alike = [gpu for known, gpu in GPUS.items() if words >= set(known.split("-"))] or [GPUS["H100"]]
    like = min(alike, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    # The driver counts a little that CUDA cannot use, unlike the table.
    if abs(memory_gib / like.memory_gib - 1) < 0.03:
        memory_gib = like.memory_gib
    has_bf16 = like.has_bf16 if found.capability is None else found.capability >= BF16_CAPABILITY
    name = found.name.removeprefix("NVIDIA ") or like.name
    return replace(like, name=name, memory_gib=memory_gib, has_bf16=has_bf16)


def known_gpu(key: str, name: str | None) -> GpuType | None:
    """The GPU type of a name, or None for None. Raises PreflightFailed for an unknown name."""
    if name is None:
        return None
    for known, gpu in GPUS.items():
        if known.lower() == str(name).lower():
            return gpu
    why = f"no GPU {name!r} is known{did_you_mean(str(name).upper(), GPUS)}"
    raise refusal(key, why, f"choose one of {', '.join(GPUS)}, or add it to drzero/recipe/gpu_prices.py")
