"""Drawing documents for prompts: all ids paged over and a reservoir, against records drawn by their hash.

    python -m bench.prompt_sampling                          # 200,000 records, into bench/README.md
    python -m bench.prompt_sampling --records 20000 --documents 1000 --dry

A folder collection of synthetic records with vectors of 8 dimensions (a small graph: it is not searched) is
written once. Then each way draws the same number of documents in a process of its own: `iter_documents` with
a reservoir over all, as indices without draws are read, and the first of `draw_documents`. Reported are
seconds, records whose texts were read, and the peak of memory beyond that of an open collection.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.gates import replace_section
from bench.machine import machine
from search.chroma.location import connect
from search.chroma.store import DRAW, draw_documents, draw_of, iter_documents

README = Path(__file__).parent / "README.md"
TITLE = "## Drawing documents for prompts"
NAME = "drawn"
PAGE = 5000
Document = tuple[str, str, str]
WAYS = {"all ids, reservoir": "reservoir", "by draws": "draws"}


def write(folder: str, records: int) -> None:
    """Write the collection."""
    rng = np.random.default_rng(0)
    graph: Any = {"max_neighbors": 4, "ef_construction": 8, "sync_threshold": records}
    with connect(folder, create=True) as client:
        handle = client.create_collection(NAME, configuration={"hnsw": graph}, embedding_function=None)
        for start in range(0, records, PAGE):
            ids = [f"document-{number}" for number in range(start, min(start + PAGE, records))]
            handle.add(
                ids=ids,
                embeddings=rng.normal(size=(len(ids), 8)).astype(np.float32),
                documents=[f"The text of {key}." for key in ids],
                metadatas=[{"title": key, DRAW: draw_of(key)} for key in ids],
            )


def measure(folder: str, way: str, documents: int) -> dict[str, float]:
    """Draw in this process."""
    with connect(folder) as client:
        client.get_collection(NAME, embedding_function=None).count()
    before, begun, read = _peak(), time.monotonic(), 0

    def counted(some: Iterator[Document]) -> Iterator[Document]:
        nonlocal read
        for one in some:
            read += 1
            yield one

    if way == "draws":
        drawn = list(islice(counted(draw_documents(folder, NAME, 0)), documents))
    else:
        drawn = _reservoir(counted(iter_documents(folder, NAME)), documents)
    assert len({key for key, *_ in drawn}) == documents
    return {"seconds": time.monotonic() - begun, "read": read, "memory": _peak() - before}


def _reservoir(some: Iterator[Document], size: int) -> list[Document]:
    rng = random.Random(0)
    chosen: list[Document] = []
    for number, document in enumerate(some, start=1):
        if len(chosen) < size:
            chosen.append(document)
        elif (place := rng.randrange(number)) < size:
            chosen[place] = document
    return chosen


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Write, draw in child processes, print, and write the section to bench/README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--documents", type=int, nargs="*", default=[1000, 38_400])
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, way = args.child
        print(json.dumps(measure(folder, way, args.documents[0])))
        return
    lines = [
        f"`python -m bench.prompt_sampling --records {args.records}`: documents drawn from a folder "
        f"collection of {args.records:,} records; {machine('chromadb')}.",
        "",
        "| documents | way | seconds | texts read | memory, MiB |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, args.records)
        for documents in args.documents:
            for shown, way in WAYS.items():
                command = [sys.executable, "-m", "bench.prompt_sampling", "--documents", str(documents)]
                done = subprocess.run(
                    [*command, "--child", folder, way], check=True, stdout=subprocess.PIPE, text=True
                )
                found = json.loads(done.stdout.splitlines()[-1])
                lines.append(
                    f"| {documents:,} | {shown} | {found['seconds']:.1f} | {found['read']:,} "
                    f"| {found['memory']:.0f} |"
                )
                print(lines[-1], flush=True)
    if not args.dry:
        text = README.read_text(encoding="utf-8")
        README.write_text(replace_section(text, TITLE, "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
