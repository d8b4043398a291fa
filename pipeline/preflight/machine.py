"""The machine that a config declares, which preflight checks against wherever it runs itself."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from omegaconf import DictConfig

from ops.resources.cgroup import memory_limit
from ops.resources.gpu import gpus_here
from pipeline.preflight.finding import refusal
from pipeline.rates import GPUS, GpuType, usd_per_hour


@dataclass(frozen=True)
class Machine:
    """The type of machine of a run, and the number of machines."""

    is_local: bool
    """The user's own machine; else the provider's."""
    is_here: bool
    """Whether it can be the machine that preflight runs on."""
    gpu: GpuType | None
    gpus: int
    nodes: int
    cores: float
    host_gib: float | None
    """Host memory; None if it is neither declared nor readable from here."""
    region: str | None = None
    """The provider's region, if one is set."""

    @property
    def usd_per_hour(self) -> float:
        """Price of all machines; 0 for a local one."""
        if self.is_local:
            return 0.0
        one = usd_per_hour(self.gpu, self.gpus, self.cores, self.host_gib or 0.0, self.region)
        return self.nodes * one

    def __str__(self) -> str:
        gpus = f"{self.gpus} × {self.gpu.name}" if self.gpu else "no GPU"
        nodes = f"{self.nodes} machines with {gpus}" if self.nodes > 1 else gpus
        return f"{nodes}, {'this machine or one like it' if self.is_local else 'Modal'}"


def declared_machine(config: DictConfig, *, starting: bool) -> Machine:
    """The machine of a resolved config; `starting`: the run starts on this one.

    Raises PreflightFailed for an unknown GPU type.
    """
    compute, declared = config.compute, config.machine
    is_local = compute.provider == "local"
    uses_gpus = declared.device != "cpu"
    if is_local:
        gpu = known_gpu("machine.gpu", declared.gpu) if uses_gpus else None
        gpus = declared.gpus if uses_gpus else 0
        is_here = starting or gpus_here() >= gpus
    else:
        gpu = known_gpu("compute.type", compute.type)
        gpus = compute.count or 0
        is_here = starting
    asked_gib = compute.memory / 1024 if compute.memory else None
    return Machine(
        is_local=is_local,
        is_here=is_here,
        gpu=gpu,
        gpus=gpus if gpu else 0,
        nodes=declared.nodes,
        cores=compute.cpu or 0,
        host_gib=asked_gib or (memory_limit() / 2**30 if is_local and is_here else None),
        region=compute.region,
    )


def known_gpu(key: str, name: str | None) -> GpuType | None:
    """The GPU type of a name, None for None; raises PreflightFailed for a name that is not in the table."""
    if name is None:
        return None
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    if str(name).lower() in by_name:
        return by_name[str(name).lower()]
    near = difflib.get_close_matches(str(name).upper(), GPUS, n=1, cutoff=0.4)
    raise refusal(
        key,
        f"no GPU {name!r} is known" + (f", did you mean {near[0]!r}?" if near else ""),
        f"choose one of {', '.join(GPUS)}, or add it to pipeline/rates.py",
    )
