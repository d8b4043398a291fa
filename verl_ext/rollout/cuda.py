"""veRL's CUDA platform, whose engines do not inherit the trainer's recorder (veRL 0.9.1, torch 2.9 to 2.13).

The trainer's ranks record their collectives with torch's Flight Recorder
(`drzero/stages/flight_recorder.py`). Ray hands their environment to every process, and torch names pipes
and dumps by global rank, which counts from 0 in each engine again: an engine's rank would unlink the pipe
of the trainer's, and of two that start at once one would end. veRL adds what `rollout_env_vars` returns to
the environment of each engine's server, whose schedulers inherit it.
"""

from verl.plugin.platform.platform_cuda import PlatformCUDA

NO_RECORDER = {
    # Either name, by release.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Empty means none: Ray cannot take a variable away.
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "",
}


class CudaPlatform(PlatformCUDA):
    """The stock platform, under its own name."""

    def rollout_env_vars(self) -> dict[str, str]:
        """The environment of the rollout engines."""
        return super().rollout_env_vars() | NO_RECORDER
