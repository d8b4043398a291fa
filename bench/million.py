"""A million vectors in Chroma, whole and in shards, and in FAISS: what writing and asking takes.

    python -m bench.million --folder /data/million                # 1,000,000 vectors, into bench/README.md
    python -m bench.million --vectors 2000 --folder /tmp/million --dry

Unit vectors of 384 numbers around 1,000 centres and queries of the same kind (fixed seed), each vector with
a text of 200 characters, are written as one Chroma collection, as four shards (`--writers` of them at once,
each by a process), as an HNSW and an IVF-PQ index of FAISS, all with the parameters of an index build. Then
each index is opened as the retrieval service opens it and asked: recall@3 of 200 queries against exact
search, and queries a second in batches of 64.

Each case is written and asked by processes of its own. Counted are the bytes that those passed to `write`
(wchar of /proc/self/io), the peak of their memory (of those that write at once the sum), and what the folder
holds. A finished case leaves a record in `--folder` and its index is removed: the script run again measures
the others. The vectors take 1.5 GB there.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.gates import replace_section
from bench.machine import machine
from drzero.ops.files import atomic_path, atomic_write
from search.stored_index import CollectionInfo, Index

README = Path(__file__).parent / "README.md"
TITLE = "## A million vectors"
DIMENSION, CENTRES, SPREAD = 384, 1000, 0.8
QUERIES, BATCH, BATCHES, TOPK = 200, 64, 16, 3
PAGE = 10_000
NAME = "million"
TEXT = ("Of a chunk's text two hundred characters. " * 5)[:200]


class Case(NamedTuple):
    """How an index is stored: its name in the table, its shards in Chroma (0: in FAISS), FAISS's kind."""

    shown: str
    shards: int
    kind: str = ""


CASES = {
    "chroma": Case("Chroma, one collection", 1),
    "shards": Case("Chroma, four shards", 4),
    "hnsw": Case("FAISS, HNSW", 0, "hnsw"),
    "ivfpq": Case("FAISS, IVF-PQ", 0, "ivfpq"),
}


# --- vectors ---


def made(seed: int, count: int) -> np.ndarray:
    """Unit vectors (count, DIMENSION) around the centres."""
    centres = np.random.default_rng(0).normal(size=(CENTRES, DIMENSION)).astype(np.float32)
    rng = np.random.default_rng((1, seed))
    noise = rng.standard_normal((count, DIMENSION), dtype=np.float32)
    near = centres[rng.integers(CENTRES, size=count)] + SPREAD * noise
    return near / np.linalg.norm(near, axis=1, keepdims=True)


def queries() -> np.ndarray:
    """Vectors of the same kind, which no index has."""
    return made(2**40, QUERIES)


def pages(folder: Path, vectors: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all vectors, a page at a time, each page with the number of its first; made if missing."""
    path = folder / f"vectors-{vectors}.f32"
    if not path.exists():
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            for start in range(0, vectors, PAGE):
                made(start, min(PAGE, vectors - start)).tofile(file)
    for start in range(0, vectors, PAGE):  # not mapped, which would count as memory
        some = np.fromfile(path, np.float32, PAGE * DIMENSION, offset=4 * DIMENSION * start)
        yield start, some.reshape(-1, DIMENSION)


def nearest(folder: Path, vectors: int) -> np.ndarray:
    """Return the numbers of the nearest vectors of each query (QUERIES, TOPK), by exact search."""
    asked = queries()
    scores, numbers = np.full((QUERIES, TOPK), -2.0), np.zeros((QUERIES, TOPK), int)
    for start, page in pages(folder, vectors):
        found = asked @ page.T
        best = np.argsort(-found, axis=1)[:, :TOPK]
        scores = np.hstack([scores, np.take_along_axis(found, best, axis=1)])
        numbers = np.hstack([numbers, best + start])
        kept = np.argsort(-scores, axis=1)[:, :TOPK]
        scores, numbers = (np.take_along_axis(some, kept, axis=1) for some in (scores, numbers))
    return numbers


# --- writing ---


def info_of(vectors: int, shard: str = "") -> CollectionInfo:
    """How the index is recorded."""
    embedder: dict[str, Any] = {
        "embedder": "made/up",
        "revision": "1",
        "query_prefix": "",
        "passage_prefix": "",
    }
    return CollectionInfo(
        **embedder,
        dimension=DIMENSION,
        documents=vectors,
        chunks=vectors,
        chunk_tokens=256,
        chunk_overlap=0,
        version="1",
        shard=shard,
        whole="1" if shard else "",
    )


def write_chroma(folder: Path, vectors: int, shards: int, number: int) -> None:
    """Write one collection, or a shard of it, as an index build does."""
    from search.chroma.location import connect
    from search.chroma.shard_layout import ShardLayout, shard_of
    from search.chroma.store import HNSW, SYNC_THRESHOLD, set_sync_threshold, sync_threshold
    from search.indexing.collection import FOLDER_PAGE

    layout = ShardLayout.parse([folder], NAME, shards)
    place, name = layout.place(number) if shards > 1 else (layout.places[0], NAME)
    parameters: Any = HNSW | {"sync_threshold": sync_threshold(vectors // shards)}
    with connect(place, create=True) as client:
        handle = client.create_collection(name, configuration={"hnsw": parameters}, embedding_function=None)
        for start, page in pages(folder.parent, vectors):
            rows = [row for row in range(len(page)) if shard_of(str(start + row), shards) == number]
            for begin in range(0, len(rows), FOLDER_PAGE):
                some = rows[begin : begin + FOLDER_PAGE]
                handle.add(
                    ids=[str(start + row) for row in some],
                    embeddings=page[some],
                    documents=[TEXT] * len(some),
                    metadatas=[{"title": str(start + row)} for row in some],
                )
        set_sync_threshold(handle, SYNC_THRESHOLD)
        shard = f"{number}/{shards}" if shards > 1 else ""
        handle.modify(metadata=info_of(handle.count(), shard).to_metadata())
    with connect(place) as client:  # writes what still waits
        client.get_collection(name, embedding_function=None).get(limit=1, include=["embeddings"])


def write_faiss(folder: Path, vectors: int, kind: str) -> None:
    """Write an index of FAISS with its corpus, as an index build does."""
    import faiss

    from search.faiss.jsonl_passages import JsonlPassages
    from search.faiss.location import CORPUS_FILE, FaissFiles
    from search.indexing.faiss_size import CONSTRUCTION, LINKS, code_bytes, lists_of, sample_of
    from search.stored_index import INDEX_FILE

    folder.mkdir()
    files = FaissFiles(folder / INDEX_FILE, folder / CORPUS_FILE)
    index: Any
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(DIMENSION, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = CONSTRUCTION
    else:
        coarse, code = faiss.IndexFlatIP(DIMENSION), code_bytes(DIMENSION)
        index = faiss.IndexIVFPQ(coarse, DIMENSION, lists_of(vectors), code, 8, faiss.METRIC_INNER_PRODUCT)
        for clustering in (index.cp, index.pq.cp):
            clustering.min_points_per_centroid = 1  # a small sample is no reason for lines on stderr
        index.train(
            np.concatenate(
                [page for _, page in islice(pages(folder.parent, vectors), -(-sample_of(vectors) // PAGE))]
            )
        )
    with files.corpus.open("w", encoding="utf-8") as lines:
        for start, page in pages(folder.parent, vectors):
            index.add(page)
            for row in range(start, start + len(page)):
                lines.write(json.dumps({"id": str(row), "title": str(row), "text": TEXT}) + "\n")
    faiss.write_index(index, str(files.index))
    JsonlPassages(files.corpus).close()
    files.write_record(info_of(vectors), kind)


def written(folder: Path, vectors: int, case: Case, number: int) -> dict[str, float]:
    """Write an index, or a shard of one, in this process; bytes."""
    begun = _written()
    if case.shards:
        write_chroma(folder, vectors, case.shards, number)
    else:
        write_faiss(folder, vectors, case.kind)
    return {"written": _written() - begun, "memory": _peak()}


def asked(folder: Path, case: Case, truth: np.ndarray) -> dict[str, float]:
    """Open an index as the service does and ask it, in this process."""
    some = queries()
    with closing(_index(folder, case).open()) as store:
        answers = [
            hits
            for start in range(0, QUERIES, BATCH)
            for hits in store.query(some[start : start + BATCH], TOPK)
        ]
        found = [{int(hit["document"]["title"]) for hit in hits} for hits in answers]
        right = sum(len(mine & set(own)) for mine, own in zip(found, truth.tolist(), strict=True))
        many, begun = np.resize(some, (BATCHES * BATCH, DIMENSION)), time.monotonic()
        for start in range(0, len(many), BATCH):
            store.query(many[start : start + BATCH], TOPK)
        seconds = time.monotonic() - begun
    return {"recall": right / truth.size, "a_second": len(many) / seconds, "serving": _peak()}


def _index(folder: Path, case: Case) -> Index:
    if case.shards:
        from search.chroma.sharded_store import chroma_index

        return chroma_index([folder], NAME, case.shards)
    from drzero.recipe.settings.retrieval import Faiss
    from search.faiss.store import FaissIndex

    return FaissIndex(folder, None, folder, Faiss.ef_search, Faiss.nprobe, "cpu")


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- cases ---


def measure(args: argparse.Namespace, name: str) -> dict[str, float]:
    """Write and ask one case in child processes; return its record."""
    case, index = CASES[name], args.folder / name
    shutil.rmtree(index, ignore_errors=True)  # of a run that was cut off
    begun = time.monotonic()
    with ThreadPoolExecutor(args.writers) as pool:
        parts = list(pool.map(partial(_child, args, name, "write"), range(max(case.shards, 1))))
    seconds = time.monotonic() - begun
    peaks = sorted((part["memory"] for part in parts), reverse=True)
    record = {
        "written": sum(part["written"] for part in parts),
        "seconds": seconds,
        "memory": sum(peaks[: args.writers]),
        "disk": sum(path.stat().st_size for path in index.rglob("*") if path.is_file()),
        **_child(args, name, "ask", 0),
    }
    shutil.rmtree(index)
    return record


def _child(args: argparse.Namespace, name: str, what: str, number: int) -> dict[str, float]:
    own = ["--vectors", str(args.vectors), "--folder", str(args.folder)]
    command = [sys.executable, "-m", "bench.million", *own, "--child", name, what, str(number)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def table(args: argparse.Namespace, records: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the section's lines."""
    yield (
        f"`python -m bench.million --vectors {args.vectors} --writers {args.writers}`: unit vectors of "
        f"{DIMENSION} numbers around {CENTRES:,} centres, each with 200 characters of text; "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; {machine('chromadb', 'faiss-cpu')}."
    )
    yield ""
    yield (
        "| index | written, GiB | folder, GiB | seconds | memory to write, GiB | memory to serve, GiB "
        f"| recall@{TOPK} | queries/s, batches of {BATCH} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, case in CASES.items():
        if record := records.get(name):
            sizes = {what: record[what] / 2**30 for what in ("written", "disk", "memory", "serving")}
            yield (
                f"| {case.shown} | {sizes['written']:.2f} | {sizes['disk']:.2f} | {record['seconds']:,.0f} "
                f"| {sizes['memory']:.2f} | {sizes['serving']:.2f} | {record['recall']:.3f} "
                f"| {record['a_second']:,.0f} |"
            )


def main() -> None:
    """Measure the cases that were named and have no record; write the table of all records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", choices=[[], *CASES], metavar="CASE", help=f"of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of the indices, one at a time, and records"
    )
    parser.add_argument(
        "--writers", type=int, default=2, help="shards written at once (default: %(default)s)"
    )
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    truth = args.folder / f"nearest-{args.vectors}.npy"
    if args.child:
        name, what, number = args.child
        index, case = args.folder / name, CASES[name]
        done = what == "write" and written(index, args.vectors, case, int(number))
        print(json.dumps(done or asked(index, case, np.load(truth))))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if not truth.exists():
        np.save(truth, nearest(args.folder, args.vectors))
    records: dict[str, dict[str, float]] = {}
    for name in CASES:
        path = args.folder / f"{name}-{args.vectors}.json"
        if not path.exists():
            if name not in (args.cases or CASES):
                continue
            atomic_write(path, json.dumps(measure(args, name)))
        records[name] = json.loads(path.read_text(encoding="utf-8"))
        print(list(table(args, {name: records[name]}))[-1], flush=True)
    if not args.dry:
        text = README.read_text(encoding="utf-8")
        section = replace_section(text, TITLE, "\n".join(table(args, records)))
        README.write_text(section, encoding="utf-8")


if __name__ == "__main__":
    main()
