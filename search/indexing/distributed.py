"""Embed with several GPUs, cores or machines, through Ray. Machines need no shared file system."""

import logging
import os
from collections.abc import Iterator
from typing import Any

# A private Ray reads these at import: servers only on loopback, and no niceness that starves its workers.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
from ray.util import ActorPool

from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.indexing.journal import IndexJournal, JournalRow

OBJECT_STORE_BYTES = 512 * 2**20


class _Encoder:
    def __init__(self, spec: EmbedderSpec) -> None:
        self._embedder = Embedder(spec)
        self._embedder.load()

    def encode(self, unit: int, passages: list[str]) -> tuple[int, np.ndarray]:
        return unit, self._embedder.encode_passages(passages)


def embed_with_ray(
    journal: IndexJournal, units: int, spec: EmbedderSpec, workers: int
) -> Iterator[tuple[list[JournalRow], np.ndarray]]:
    """Yield units of chunks and vectors, in any order. Raises StoreError without enough GPUs or cores."""
    if not units:
        return
    private: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        private = {"address": "local", "num_cpus": workers, "include_dashboard": False}
        private["object_store_memory"] = OBJECT_STORE_BYTES
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **private)
    try:
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0 and spec.device != "cpu"
        kind = "GPU" if on_gpu else "CPU"
        available = int(ray.cluster_resources().get(kind, 0))
        if workers > available:
            raise StoreError(
                f"{workers} workers need as many {kind}s, and Ray has {available}: set fewer workers"
            )
        # A lost worker's successor repeats its work.
        resources: Any = {"num_gpus": 1, "num_cpus": 0} if on_gpu else {"num_cpus": 1}
        encoder = ray.remote(max_restarts=-1, max_task_retries=-1, **resources)(_Encoder)
        # Each twice: a worker gets its next unit before its last vectors are stored.
        pool = ActorPool(2 * [encoder.remote(spec) for _ in range(workers)])

        def encode(worker: Any, unit: int) -> Any:
            return worker.encode.remote(unit, [row.passage for row in journal.unembedded(unit)])

        for unit, vectors in pool.map_unordered(encode, list(range(units))):
            if rows := journal.unembedded(unit):
                yield rows, vectors
    finally:
        ray.shutdown()
