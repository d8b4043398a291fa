"""Bytes that Chroma writes for a vector, by the threshold at which it writes its vector files.

    python -m bench.index_writes                            # 16,000 vectors, into bench/README.md
    python -m bench.index_writes --vectors 100000 --dimension 384 --dry

Each case runs in its own process: random unit vectors, each with a text of 200 characters, go into a folder
collection with the parameters of new collections (`search.chroma.store.HNSW`), a thousand at a time, as an
index build writes them; then it is opened once with Chroma's own threshold, which writes what still waits.
Counted are the bytes that the process passed to `write` (wchar of /proc/self/io; write_bytes depends on
what the page cache has sent to the disk by then, and is 0 for a folder in memory), the seconds, the peak of
its memory beyond that before the first vector, and what the folder holds in the end. The last column is
what, without that opening, a service would spend at each of its starts: inserting the vectors that wait in
SQLite's queue.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
from chromadb.config import Settings

from bench.gates import replace_section
from bench.machine import machine
from search.chroma.store import HNSW, SYNC_THRESHOLD, set_sync_threshold, sync_threshold
from search.indexing.collection import FOLDER_PAGE

README = Path(__file__).parent / "README.md"
TITLE = "## Writing an index"
NAME = "written"
TEXT = "Of a chunk's text two hundred characters. " * 5


def measure(vectors: int, dimension: int, threshold: int, batch: int) -> dict[str, float]:
    """Write a collection in this process; sizes are bytes, times seconds."""
    rng = np.random.default_rng(0)
    parameters: Any = HNSW | {"sync_threshold": threshold, "batch_size": batch}
    with tempfile.TemporaryDirectory() as folder:
        with closing(_client(folder)) as client:
            handle = client.create_collection(
                NAME, configuration={"hnsw": parameters}, embedding_function=None
            )
            before, begun, written = _peak(), time.monotonic(), _written()
            for start in range(0, vectors, FOLDER_PAGE):
                count = min(FOLDER_PAGE, vectors - start)
                some = rng.normal(size=(count, dimension)).astype(np.float32)
                handle.add(
                    ids=[f"document-{start + row}" for row in range(count)],
                    embeddings=some / np.linalg.norm(some, axis=1, keepdims=True),
                    documents=[TEXT[:200]] * count,
                    metadatas=[{"title": "A title"}] * count,
                )
            set_sync_threshold(handle, SYNC_THRESHOLD)
            seconds = time.monotonic() - begun
        waiting = _opened(folder)
        files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return {
            "written": _written() - written,
            "seconds": seconds + waiting,
            "memory": _peak() - before,
            "files": files,
            "waiting": waiting,
        }


def _client(folder: str) -> Any:
    return chromadb.PersistentClient(folder, settings=Settings(anonymized_telemetry=False))


def _opened(folder: str) -> float:
    """The seconds of an opening."""
    begun = time.monotonic()
    with closing(_client(folder)) as client:
        client.get_collection(NAME, embedding_function=None).get(limit=1, include=["embeddings"])
    return time.monotonic() - begun


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure each threshold in a child process, print, and write the section to bench/README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=int, default=16_000)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.vectors, args.dimension, *args.child)))
        return
    ours = sync_threshold(args.vectors)
    lines = [
        f"`python -m bench.index_writes --vectors {args.vectors} --dimension {args.dimension}`: into a "
        "folder collection, a thousand at a time, each vector with 200 characters of text; "
        f"{machine('chromadb')}.",
        "",
        "| sync_threshold | batch_size | bytes written a vector | times the folder | folder, bytes a vector "
        "| peak memory, bytes a vector | seconds | of them at the last opening |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    cases = [(SYNC_THRESHOLD, 100), (SYNC_THRESHOLD, SYNC_THRESHOLD)]
    cases += [(threshold, 100) for threshold in (ours // 2, ours, 2 * ours, args.vectors + 1)]
    for threshold, batch in dict.fromkeys(cases):
        own = ["--vectors", str(args.vectors), "--dimension", str(args.dimension)]
        command = [sys.executable, "-m", "bench.index_writes", *own, "--child", str(threshold), str(batch)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        each = {name: found[name] / args.vectors for name in ("written", "files", "memory")}
        lines.append(
            f"| {threshold:,} | {batch:,} | {each['written']:,.0f} | {found['written'] / found['files']:.1f} "
            f"| {each['files']:,.0f} | {each['memory']:,.0f} | {found['seconds']:.0f} "
            f"| {found['waiting']:.1f} |"
        )
        print(lines[-1], flush=True)
    if not args.dry:
        text = README.read_text(encoding="utf-8")
        README.write_text(replace_section(text, TITLE, "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
