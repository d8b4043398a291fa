"""The machine that a run is declared for: what preflight judges by, wherever it runs itself."""

from __future__ import annotations

import difflib
import shutil
import subprocess
from dataclasses import dataclass

from omegaconf import DictConfig

from ops.host_memory import memory_limit
from pipeline.finding import refusal
from pipeline.rates import GPUS, Gpu, usd_per_hour


@dataclass(frozen=True)
class Machine:
    """One machine of a run, and how many of them there are."""

    is_local: bool
    """A machine of one's own; else the provider's."""
    is_here: bool
    """Whether it is, or may well be, the machine that preflight runs on."""
    gpu: Gpu | None
    gpus: int
    nodes: int
    cores: float
    host_gib: float | None
    """Host memory; None where nobody has said and it cannot be looked at."""
    region: str | None = None
    """Where on the provider's side, if that was asked for."""

    @property
    def usd_per_hour(self) -> float:
        """What it costs; nothing for a machine of one's own."""
        if self.is_local:
            return 0.0
        one = usd_per_hour(self.gpu, self.gpus, self.cores, self.host_gib or 0.0, self.region)
        return self.nodes * one

    def __str__(self) -> str:
        gpus = f"{self.gpus} × {self.gpu.name}" if self.gpu else "no GPU"
        nodes = f"{self.nodes} machines with {gpus}" if self.nodes > 1 else gpus
        return f"{nodes}, {'this machine or one like it' if self.is_local else 'Modal'}"


def gpus_here() -> int:
    """GPUs of this machine, as nvidia-smi lists them."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    ).stdout
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def declared_machine(config: DictConfig, *, starting: bool) -> Machine:
    """The machine of a resolved config; `starting` says that the run begins here and now.

    Raises PreflightFailed for a GPU that nobody knows.
    """
    compute, trainer = config.compute, config.trainer
    is_local = compute.provider == "local"
    uses_gpus = trainer.device != "cpu"
    if is_local:
        gpu = known_gpu("machine.gpu", config.machine.gpu) if uses_gpus else None
        gpus = trainer.n_gpus_per_node if uses_gpus else 0
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
        nodes=trainer.nnodes,
        cores=compute.cpu or 0,
        host_gib=asked_gib or (memory_limit() / 2**30 if is_local and is_here else None),
        region=compute.region,
    )


def known_gpu(key: str, name: str | None) -> Gpu | None:
    """The GPU of that name, None for none; raises PreflightFailed for a name that the table does not have."""
    if name is None:
        return None
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    if str(name).lower() in by_name:
        return by_name[str(name).lower()]
    near = difflib.get_close_matches(str(name).upper(), GPUS, n=1, cutoff=0.4)
    raise refusal(
        key,
        name,
        f"no GPU {name!r} is known" + (f", did you mean {near[0]!r}?" if near else ""),
        f"choose one of {', '.join(GPUS)}, or add it to pipeline/rates.py",
    )
