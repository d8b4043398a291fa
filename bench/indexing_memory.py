"""Peak memory of indexing by the number of documents, in real runs without the embedding model.

    python -m bench.indexing_memory                        # 5,000 and 50,000 documents
    python -m bench.indexing_memory 20000 200000

Each size runs in its own process: a JSONL corpus of one-line documents is indexed by `search.index` with
random vectors of 8 dimensions in place of the model's, so that only our part is measured. Two peaks are
printed: until the vectors are in the journal, which must not grow with the corpus, and of the whole run, in
which Chroma holds the vectors and the ids of the graph that it builds.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

DIMENSION = 8


def measure(documents: int) -> dict[str, float]:
    """Index this many documents in this process; return the peaks in MiB."""
    from search.embedders import Embedder, EmbedderSpec
    from search.indexing.build import build_index
    from search.indexing.collection import Collection

    def encode(_: Embedder, texts: Sequence[str]) -> np.ndarray:
        vectors = np.random.default_rng(0).normal(size=(len(texts), DIMENSION)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    peaks: dict[str, float] = {}
    write = Collection.write_folder

    def noting(*arguments: object) -> None:
        peaks["before Chroma is written"] = _peak()
        write(*arguments)  # type: ignore[arg-type]

    Embedder.encode_passages = encode  # type: ignore[method-assign]
    Embedder.dimension = DIMENSION  # type: ignore[assignment]
    Collection.write_folder = noting  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "corpus.jsonl"
        with source.open("w") as file:
            file.writelines(
                json.dumps({"id": f"document-{n}", "text": f"Text {n}."}) + "\n" for n in range(documents)
            )
        spec = EmbedderSpec("packaged-minilm", "cpu")
        build_index(source, Path(folder) / "chroma", "wiki", spec)
    peaks["whole run"] = _peak()
    return peaks


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each size in a child process and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", type=int, nargs="*", default=[5000, 50000])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.documents[0])))
        return
    for documents in args.documents:
        command = [sys.executable, "-m", "bench.indexing_memory", str(documents), "--child"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peaks = json.loads(output.splitlines()[-1])
        print(
            f"{documents:>9,} documents: "
            + ", ".join(f"{what} {mib:,.0f} MiB" for what, mib in peaks.items())
        )


if __name__ == "__main__":
    main()
