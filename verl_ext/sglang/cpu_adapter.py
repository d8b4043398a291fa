"""veRL's weight adapter for SGLang with weights in host memory (veRL 0.9.1, SGLang 0.5.12)."""

from typing import Any

import torch.multiprocessing
from torch.multiprocessing import reductions
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter


class CpuServerAdapter(ServerAdapter):
    """Sends tensors through shared memory, as torch itself does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SGLang's patch of torch reads a CUDA device number. With this mark it believes itself applied.
        vars(reductions)["_reduce_tensor_original"] = reductions.reduce_tensor
        # torch's default passes file descriptors, which do not survive SGLang's HTTP.
        torch.multiprocessing.set_sharing_strategy("file_system")
