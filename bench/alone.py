"""CPU time per query of the encoder or the index alone, by batch size, without a service around them.

    python -m bench.alone encoder --folder world --embedder packaged-minilm --seconds 5
    python -m bench.alone index --folder world --embedder packaged-minilm --seconds 5

`world` is a folder prepared by bench/retrieval.py. Prints "ready", waits for its stdin to close, so
that several can begin together, and prints one JSON object: CPU milliseconds per query of each batch size.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.retrieval_world import QUERIES_FILE, Queries
from search.chroma.store import Store, open_collection
from search.embedders import Embedder, EmbedderSpec

BATCHES = (1, 8, 32, 64, 128, 256)
COLLECTION = "bench"
QUERIES = 1 << 14


def cost_ms(work: Callable[[int], int], seconds: float) -> float:
    """Return CPU milliseconds per query. `work(turn)` does one batch and returns its number of queries."""
    work(0)
    done, turn, begun, end = 0, 1, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end or not done:
        done += work(turn)
        turn += 1
    return 1000 * (time.process_time() - begun) / done


def slices(count: int, batch: int, turn: int) -> slice:
    """Return the next `batch` of `count` items, wrapping around."""
    start = turn * batch % (count - batch + 1)
    return slice(start, start + batch)


def encoder_cost(embedder: Embedder, queries: list[str], batch: int, seconds: float) -> float:
    """Return CPU milliseconds to encode a query."""
    return cost_ms(
        lambda turn: len(embedder.encode_queries(queries[slices(len(queries), batch, turn)])), seconds
    )


def index_cost(store: Store, vectors: np.ndarray, batch: int, seconds: float) -> float:
    """Return CPU milliseconds to search for a query and fetch its passages."""
    return cost_ms(lambda turn: len(store.query(vectors[slices(len(vectors), batch, turn)], 3)), seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["encoder", "index"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each batch size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    queries = Queries.read(args.folder / QUERIES_FILE).texts[:QUERIES]
    embedder = Embedder(EmbedderSpec(args.embedder))
    embedder.load()
    if args.what == "encoder":
        _begin()
        costs = {batch: encoder_cost(embedder, queries, batch, args.seconds) for batch in BATCHES}
    else:
        vectors = embedder.encode_queries(queries[:2048])
        with open_collection(args.folder / "chroma", COLLECTION) as store:
            _begin()
            costs = {batch: index_cost(store, vectors, batch, args.seconds) for batch in BATCHES}
    print(json.dumps(costs))


def _begin() -> None:
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
