"""Embedding with several GPUs, cores or machines, through Ray Data.

    python -m search.index … --workers 8
    RAY_ADDRESS=head:6379 python -m search.index … --workers 64

The journal's units are the rows of a Ray data set, and `map_batches` runs them over a pool of actors, each
with its own `Embedder`. An actor fetches its unit's texts from an actor on the journal's machine, so only
units in progress are in memory, and the machines need no common file system. Vectors arrive in any order and
are matched by unit. Units are the same as in one process, and so are the vectors (to the last bit, if the
processes have the same hardware and number of threads).

Without RAY_ADDRESS a private Ray is started for the duration, on this machine and on 127.0.0.1 alone.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# For a private Ray, which reads them when it is imported.
if not os.environ.get("RAY_ADDRESS"):
    # Its servers then stay on loopback. (The name is Ray's.)
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray starts its workers at niceness 15, and anything else on the machine would starve them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray Data gives up on its own actor after eleven times 5 s, too short for a start on a busy machine.
    os.environ.setdefault("RAY_DATA_AUTOSCALING_COORDINATOR_REQUEST_GET_TIMEOUT_S", "60")

import numpy as np
import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from search.embedders import Embedder, EmbedderSpec
from search.indexing.journal import IndexJournal, Row
from search.place import StoreError

OBJECT_STORE_BYTES = 512 * 2**20


class _Texts:
    """An actor on the journal's machine, from which the others fetch the texts to embed."""

    def __init__(self, path: Path) -> None:
        self._journal = IndexJournal(path, read_only=True)

    def passages(self, unit: int) -> list[str]:
        """Return the passages of a unit that have no vectors yet."""
        return [row.passage for row in self._journal.unembedded(unit)]


class _Encode:
    """An actor of the pool: from a unit's number to its vectors."""

    def __init__(self, spec: EmbedderSpec, texts: Any) -> None:
        self._encoder = Embedder(spec)
        self._encoder.load()
        self._texts = texts

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        unit = int(batch["id"][0])
        passages = ray.get(self._texts.passages.remote(unit))
        vectors = self._encoder.encode_passages(passages).tobytes() if passages else b""
        return {"unit": [unit], "vectors": [vectors]}


def embed_with_ray(
    journal: IndexJournal, path: Path, units: int, spec: EmbedderSpec, workers: int
) -> Iterator[tuple[list[Row], np.ndarray]]:
    """Yield the chunks that lack vectors, with their vectors, a unit at a time, in any order.

    `path` is the journal's file. Raises StoreError if the cluster lacks the GPUs or cores for `workers`.
    """
    if not units:
        return
    with _ray(workers):
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0 and spec.device != "cpu"
        kind = "GPU" if on_gpu else "CPU"
        available = int(ray.cluster_resources().get(kind, 0))
        if workers > available:
            raise StoreError(
                f"{workers} workers need as many {kind}s, and Ray has {available}: set fewer workers"
            )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        texts = ray.remote(_Texts).options(num_cpus=0, scheduling_strategy=here).remote(path)
        vectors = ray.data.range(units, override_num_blocks=units).map_batches(
            _Encode,
            fn_constructor_args=(spec, texts),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=1 if on_gpu else None,
            num_cpus=None if on_gpu else 1,
        )
        for row in vectors.iter_rows():
            rows = journal.unembedded(row["unit"])
            if rows:
                yield rows, np.frombuffer(row["vectors"], np.float32).reshape(len(rows), -1)


@contextmanager
def _ray(workers: int) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or start a private Ray; disconnect or stop it afterwards."""
    private: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # Two cores beyond the actors', on which Ray numbers the units.
        private = {"address": "local", "num_cpus": workers + 2, "include_dashboard": False}
        private["object_store_memory"] = OBJECT_STORE_BYTES
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **private)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts chunks
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
    finally:
        ray.shutdown()
