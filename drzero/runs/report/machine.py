"""The machine of a run as its samples found it, next to the one it was planned for, and what it cost."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from drzero.preflight.machine import declared_machine
from drzero.recipe.gpu_prices import RATES_DATE
from drzero.runs.run_folder import RunFolder


def machine_of(run: RunFolder) -> str | None:
    """The GPUs that the run found, and the planned ones where they differ. None without a record."""
    device, gpus, nodes = (run.setting(f"machine.{key}") for key in ("device", "gpus", "nodes"))
    if device is None:
        return None
    if device == "cpu":
        return _times(nodes, "no GPU")
    kind, count = (
        run.setting("compute.type") or run.setting("machine.gpu"),
        run.setting("compute.count") or gpus,
    )
    planned = f"{count} × {kind or 'GPU'}"
    found = Counter(_described(gpu) for gpu in _last_gpus(run))
    if not found:
        return f"{_times(nodes, planned)}, as planned: its samples name no GPU"
    here = _times(nodes, ", ".join(f"{number} × {name}" for name, number in found.items()))
    is_planned = found.total() == count and all(_is_kind(name, kind) for name in found)
    return here if is_planned else f"{here}; planned: {planned}"


def _last_gpus(run: RunFolder) -> list[Mapping[str, Any]]:
    """The GPUs of the machine that the run last ran on: a resumed run may get another."""
    return next((sample["gpus"] for sample in reversed(run.samples) if sample.get("gpus")), [])


def _described(gpu: Mapping[str, Any]) -> str:
    name, memory_mb = gpu.get("name") or "GPU", gpu.get("total_mb")
    return f"{name}, {memory_mb / 1024:.1f} GiB" if memory_mb else str(name)


def _is_kind(described: str, kind: str | None) -> bool:
    """Whether 'NVIDIA A100-SXM4-80GB, 80.0 GiB' is an A100-80GB."""
    words = re.split("[ ,-]", described)
    return not kind or set(str(kind).rstrip("!+").split("-")) <= {*words}


def _times(nodes: int | None, machine: str) -> str:
    return f"{nodes} machines with {machine}" if (nodes or 1) > 1 else machine


def usd_per_hour(config: Mapping[str, Any]) -> float:
    """The price of the machine of a run's config, 0 without one."""
    declared = {name: config[name] for name in ("compute", "machine") if name in config}
    if len(declared) < 2:
        return 0.0
    return declared_machine(OmegaConf.create(declared), starting=True).usd_per_hour


def cost_of(run: RunFolder, config: Mapping[str, Any], seconds: float | None) -> str | None:
    """From the launcher's record, else from the price table if the machine has a price."""
    if run.spent_usd is not None:
        return f"${run.spent_usd:.2f} for all its launches"
    rate = usd_per_hour(config)
    if not seconds or not rate:
        return None
    return f"${rate * seconds / 3600:.2f} at ${rate:.2f} an hour (prices of {RATES_DATE}), pauses included"
