"""The GPUs of this machine: how many there are, their memory and their use."""

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drzero.ops.process.isolated import run_isolated

_LISTED_WITHIN_S = 20.0


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment."""

    index: int
    used_mb: int
    total_mb: int
    busy_percent: int  # share of the last sample period in which a kernel ran
    memory_mb_of: dict[int, int] = field(default_factory=dict)  # by pid. Containers may hide it
    name: str = ""  # as the driver has it
    capability: tuple[int, int] | None = None  # its CUDA compute capability, if the driver says


class Gpus:
    """All GPUs of the machine. Finds none without NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):  # no driver
                pynvml.nvmlInit()
                self._nvml = pynvml

    def read(self) -> list[GpuSample]:
        """Return a sample of each GPU that is still on the bus."""
        if (nvml := self._nvml) is None:
            return []
        count, found = 0, []
        with suppress(nvml.NVMLError):
            count = nvml.nvmlDeviceGetCount()
        for index in range(count):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                of: dict[int, int] = {}
                with suppress(nvml.NVMLError):
                    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    of = {process.pid: (process.usedGpuMemory or 0) >> 20 for process in running}
                found.append(
                    GpuSample(
                        index,
                        memory.used >> 20,
                        memory.total >> 20,
                        busy,
                        of,
                        str(nvml.nvmlDeviceGetName(handle)),
                        tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    )
                )
        return found


def gpus_here(devices: Path = Path("/dev"), limit_s: float = _LISTED_WITHIN_S) -> int:
    """Return the number of GPUs by nvidia-smi, or else by the driver's files (nvidia0, …) in `devices`."""
    if shutil.which("nvidia-smi") is not None:
        listed = run_isolated(("nvidia-smi", "--list-gpus"), limit_s)
        if listed.fault is None:
            return sum(line.startswith("GPU ") for line in listed.out.split("\n"))
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
