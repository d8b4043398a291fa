"""veRL's platforms (veRL 0.9.1): CUDA, and the CPU, chosen by `VERL_PLATFORM=cpu`.

veRL places workers only by the resource "GPU", so Ray schedules logical ones on a CPU. veRL's engines ask
for the platform during their import, so this module imports none of them.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_cuda import PlatformCUDA

# torch (2.9 to 2.13) names the Flight Recorder's pipes and dumps by global rank, which starts at 0 again in
# each engine, so an engine's rank would unlink the trainer's pipe.
NO_RECORDER = {
    # Two names, by release.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Empty means none, because Ray cannot remove a variable.
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "",
}


class CudaPlatform(PlatformCUDA):
    """The stock platform, with engines that do not inherit the Flight Recorder."""

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment of the rollout engines."""
        return super().rollout_env_vars() | NO_RECORDER


class _CpuDeviceModule(ModuleType):
    """`torch.cpu` with the memory (the process's own) and RNG calls that veRL expects."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        return int(psutil.Process().memory_info().rss)

    @staticmethod
    def max_memory_allocated(*_: Any) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    empty_cache = staticmethod(lambda: None)  # the CPU allocator caches nothing
    get_device_name = staticmethod(lambda *_: "cpu")
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


class CpuPlatform(PlatformBase):
    """veRL's view of a machine without an accelerator. Profiling and IPC are not supported."""

    @property
    def device_name(self) -> str:  # noqa: D102 - veRL's own contract, here and below
        return "cpu"

    vendor_name = device_name

    @property
    def device_module(self) -> ModuleType:  # noqa: D102
        return _CpuDeviceModule("drzero_cpu")

    def is_available(self) -> bool:  # noqa: D102
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected: a GPU machine must not fall back to the CPU by itself."""
        return False

    def current_device(self) -> Any:
        """The device's name, because `tensor.to(0)` would mean the first CUDA device."""
        return "cpu"

    def device_count(self) -> int:  # noqa: D102
        return 1

    def manual_seed(self, seed: int) -> None:  # noqa: D102
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: D102
        return None, None

    def synchronize(self, *_: Any, **__: Any) -> None:
        """Do nothing, like every call without a meaning on a CPU."""

    set_device = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = synchronize

    def communication_backend_name(self) -> str:  # noqa: D102
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The CUDA name, which Ray sets for its logical GPUs. Nothing on a CPU reads it."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: D102
        yield

    def ray_resource_name(self) -> str:  # noqa: D102
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:  # noqa: D102
        return []

    def is_ipc_supported(self) -> bool:  # noqa: D102
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """As on GPUs, and one thread per engine process, since the actor uses every core."""
        return {**NO_RECORDER, "OMP_NUM_THREADS": "1"}
