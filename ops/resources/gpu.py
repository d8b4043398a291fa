"""The GPUs of this machine: how many there are, and their memory and use now.

gpus_here()             # by nvidia-smi, which needs no Python package
Gpus().read()           # by NVML, where `nvidia-ml-py` is installed; else empty
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment."""

    index: int
    used_mb: int
    total_mb: int
    busy_percent: int
    """Share of the last sample period in which a kernel ran."""
    memory_mb_of: dict[int, int] = field(default_factory=dict)
    """By pid; empty where the driver does not report it (containers)."""


class Gpus:
    """All GPUs of the machine; without NVML it finds none."""

    def __init__(self) -> None:
        """Load NVML once."""
        self._nvml: Any = _load()

    def read(self) -> list[GpuSample]:
        """One reading of each GPU; one that has fallen off the bus is left out."""
        if self._nvml is None:
            return []
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError:
            return []
        return [gpu for index in range(count) if (gpu := self._read_one(index)) is not None]

    def _read_one(self, index: int) -> GpuSample | None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except nvml.NVMLError:
            return None
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            of = {process.pid: (process.usedGpuMemory or 0) >> 20 for process in running}
        except nvml.NVMLError:
            of = {}
        return GpuSample(index, memory.used >> 20, memory.total >> 20, busy, of)


def _load() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the package is there, the driver is not
        return None
    module: ModuleType = pynvml
    return module


def gpus_here() -> int:
    """The number of GPUs of this machine, as nvidia-smi lists them; 0 without it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    ).stdout
    return sum(line.startswith("GPU ") for line in listing.splitlines())
