"""Move a FAISS index to a GPU, if asked and possible.

faiss-cpu knows no GPU: a wheel of faiss-gpu must take its place. GPUs take flat and IVF indices, not HNSW.
"""

import logging
from typing import Any

import faiss

log = logging.getLogger("search.server")


def on_device(index: Any, device: str, size: int) -> Any:
    """Return the index on the torch device if possible, else as given. Logs which.

    `size` is the bytes that it takes there.
    """
    if device == "cpu":
        return index
    number = int(device.partition(":")[2] or 0)
    if why := _obstacle(index, number, size):
        log.warning("the FAISS index is searched on the CPU, not on %s: %s", device, why)
        return index
    moved = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)
    log.info("the FAISS index is searched on cuda:%d", number)
    return moved


def _obstacle(index: Any, number: int, size: int) -> str | None:
    """Why an index cannot be moved to a GPU, or None if it can."""
    import torch

    if faiss.get_num_gpus() <= number:
        built = "this FAISS is built for CPUs (faiss-cpu), or sees fewer GPUs"
        return f"{built}: it takes a wheel of faiss-gpu"
    if not isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat | faiss.IndexIVFPQ):
        return f"an {type(index).__name__} is not one that FAISS searches there"
    free, _ = torch.cuda.mem_get_info(number)
    return f"it takes {size / 2**30:.1f} GiB of its {free / 2**30:.1f} GiB free" if size > free else None
