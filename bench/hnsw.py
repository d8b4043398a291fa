"""Cost and recall of the HNSW parameters of a Chroma collection.

    OMP_NUM_THREADS=1 python -m bench.hnsw                          # 20,000 vectors, into bench/README.md
    OMP_NUM_THREADS=1 python -m bench.hnsw --vectors 100000 --embedder-share 0.2 --dry

Vectors are the packaged embedder's for passages of a demo world, as bench/retrieval.py prepares it; queries
are the world's questions, which lie elsewhere in the space than passages, as real ones do. With an
`--embedder-share` below 1 the other vectors are mixed from two real ones with a little noise, so that large
sizes can be measured without hours of embedding.

For every pair of max_neighbors and ef_construction a collection is built, then searched with every
ef_search: recall@3 against exact search, CPU time per query one by one and in batches of 64. Chroma fetches
ids and distances only, so the times are the index's own.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import torch
from chromadb.config import Settings

from bench.gates import replace_section
from bench.machine import machine
from bench.retrieval import prepare
from bench.retrieval_world import QUERIES_FILE, Queries
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec

README = Path(__file__).parent / "README.md"
TITLE = "## HNSW parameters, {:,} vectors"
BUILDS = ((16, 100), (16, 200), (32, 200), (48, 200))
EF_SEARCH = (50, 100, 200, 400)
QUERIES = 1024
WRITE = 2000


@dataclass(frozen=True)
class Found:
    """One line of the table; seconds to build, CPU milliseconds per query."""

    max_neighbors: int
    ef_construction: int
    ef_search: int
    build_s: float
    recall: float
    single_ms: float
    batch_ms: float


def make_vectors(count: int, real_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows: `count` passages, `QUERIES` queries."""
    rng = np.random.default_rng(0)
    real = max(60, round(count * real_share))
    folder = prepare(real, PACKAGED_EMBEDDER)
    passages = np.load(folder / "vectors.npy")
    made = count - len(passages)
    if made > 0:
        one, other = (passages[rng.integers(len(passages), size=made)] for _ in range(2))
        share = rng.uniform(0.5, 0.9, size=(made, 1)).astype(np.float32)
        noise = rng.normal(scale=0.3 / passages.shape[1] ** 0.5, size=one.shape).astype(np.float32)
        mixed = share * one + (1 - share) * other + noise
        passages = np.concatenate([passages, mixed / np.linalg.norm(mixed, axis=1, keepdims=True)])
    embedder = Embedder(EmbedderSpec(PACKAGED_EMBEDDER, "cpu"))
    return passages, embedder.encode_queries(Queries.read(folder / QUERIES_FILE).texts[:QUERIES])


def exact(passages: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The cosine of the third nearest passage of each query."""
    parts = np.array_split(queries, max(1, len(queries) // 64))
    return np.concatenate([np.partition(part @ passages.T, -3, axis=1)[:, -3] for part in parts])


def build(client: Any, passages: np.ndarray, max_neighbors: int, ef_construction: int) -> tuple[Any, float]:
    """A collection of the vectors, and the seconds it took."""
    hnsw = {"space": "cosine", "max_neighbors": max_neighbors, "ef_construction": ef_construction}
    collection = client.create_collection(
        f"m{max_neighbors}-{ef_construction}", configuration={"hnsw": hnsw}, embedding_function=None
    )
    begun = time.monotonic()
    for start in range(0, len(passages), WRITE):
        part = passages[start : start + WRITE]
        collection.add(ids=[str(start + row) for row in range(len(part))], embeddings=part)
    collection.query(query_embeddings=passages[:1], n_results=1)  # indexes what is not indexed yet
    return collection, time.monotonic() - begun


def search(
    collection: Any, passages: np.ndarray, queries: np.ndarray, third: np.ndarray
) -> tuple[float, float, float]:
    """Return recall@3, and CPU ms per query one by one and in batches of 64."""

    def ask(rows: np.ndarray) -> list[list[str]]:
        return collection.query(query_embeddings=rows, n_results=3, include=["distances"])["ids"]

    ask(queries[:1])
    begun = time.process_time()
    ids = [found for start in range(0, len(queries), 64) for found in ask(queries[start : start + 64])]
    batch = 1000 * (time.process_time() - begun) / len(queries)
    single = queries[:256]
    begun = time.process_time()
    for row in range(len(single)):
        ask(single[row : row + 1])
    one = 1000 * (time.process_time() - begun) / len(single)
    cosines = np.einsum("qkd,qd->qk", passages[np.asarray(ids, dtype=int)], queries)
    return float((cosines >= third[:, None] - 1e-5).mean()), one, batch


def measure(passages: np.ndarray, queries: np.ndarray) -> Iterator[Found]:
    """Yield the measurements of the grid."""
    third = exact(passages, queries)
    for max_neighbors, ef_construction in BUILDS:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(anonymized_telemetry=False)
            client: Any = chromadb.PersistentClient(folder, settings=settings)
            collection, seconds = build(client, passages, max_neighbors, ef_construction)
            name = collection.name
            for ef_search in EF_SEARCH:
                collection.modify(configuration={"hnsw": {"ef_search": ef_search}})
                # An open collection keeps the value it was opened with, so it is reopened.
                client.close()
                client = chromadb.PersistentClient(folder, settings=settings)
                collection = client.get_collection(name, embedding_function=None)
                yield Found(
                    max_neighbors,
                    ef_construction,
                    ef_search,
                    seconds,
                    *search(collection, passages, queries, third),
                )
            client.close()


def main() -> None:
    """Measure, print, and write the section to bench/README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=int, default=20_000)
    parser.add_argument("--embedder-share", type=float, default=1.0, help="share of vectors that are real")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    passages, queries = make_vectors(args.vectors, args.embedder_share)
    share = "" if args.embedder_share >= 1 else f", {args.embedder_share:.0%} of them real"
    lines = [
        f"`python -m bench.hnsw`: {len(passages):,} vectors of {passages.shape[1]} dimensions "
        f"({PACKAGED_EMBEDDER} on a demo world{share}), {len(queries)} questions, recall@3 against exact "
        f"search; CPU milliseconds per query; {machine('chromadb')}.",
        "",
        "| max_neighbors | ef_construction | ef_search | recall@3 | one by one, ms | in batches of 64, ms "
        "| built in, s |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for found in measure(passages, queries):
        lines.append(
            f"| {found.max_neighbors} | {found.ef_construction} | {found.ef_search} | {found.recall:.4f} "
            f"| {found.single_ms:.2f} | {found.batch_ms:.2f} | {found.build_s:.1f} |"
        )
        print(lines[-1], flush=True)
    if not args.dry:
        text = README.read_text(encoding="utf-8")
        README.write_text(
            replace_section(text, TITLE.format(args.vectors), "\n".join(lines)), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
