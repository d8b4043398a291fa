"""veRL's CUDA platform with engines that do not inherit the Flight Recorder (veRL 0.9.1, torch 2.9 to 2.13).

torch names pipes and dumps by global rank, which starts at 0 again in each engine, so an engine's rank would
unlink the trainer's pipe.
"""

from verl.plugin.platform.platform_cuda import PlatformCUDA

NO_RECORDER = {
    # Two names, by release.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Empty means none, because Ray cannot remove a variable.
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "",
}


class CudaPlatform(PlatformCUDA):
    """The stock platform, with engines that do not record."""

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment of the rollout engines."""
        return super().rollout_env_vars() | NO_RECORDER
