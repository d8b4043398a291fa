"""veRL's weight adapter of SGLang where the weights are in host memory (veRL 0.9.1, SGLang 0.5.12).

`verl_ext.plugin` puts it in the place of veRL's own on `hardware=cpu`; it lives in the training worker.
"""

from typing import Any

import torch.multiprocessing
from torch.multiprocessing import reductions
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter


class CpuServerAdapter(ServerAdapter):
    """Sends tensors through shared memory, by torch's own way of doing it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SGLang changes how torch sends a tensor: it reads the device at a place that only a CUDA tensor has
        # (sglang/srt/utils/patch_torch.py). By this mark it takes the change for made.
        vars(reductions)["_reduce_tensor_original"] = reductions.reduce_tensor
        # By default torch passes file descriptors, which do not survive SGLang's way over HTTP.
        torch.multiprocessing.set_sharing_strategy("file_system")
