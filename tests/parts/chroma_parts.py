"""Parts for the tests of the store: small collections, and a Chroma server as a child process."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
from index_builds import write_jsonl

from search.chroma.location import ChromaPlace, connect
from search.indexing.chunking import Chunk
from search.indexing.collection import Collection, write
from search.indexing.faiss_folder import FaissFolder
from search.indexing.journal import IndexJournal
from search.sources.corpus import Corpus
from search.stored_index import CollectionInfo

DIMENSION = 8
NAME = "wiki"


def unit_vectors(seed: int, count: int, dimension: int = DIMENSION) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def collection_info(version: str, count: int) -> CollectionInfo:
    return CollectionInfo(
        embedder="made/up",
        revision="1",
        dimension=DIMENSION,
        query_prefix="",
        passage_prefix="",
        documents=count,
        chunks=count,
        chunk_tokens=256,
        chunk_overlap=0,
        version=version,
    )


def build(
    place: ChromaPlace | Path | str, seed: int = 0, count: int = 1100, threshold: int = 1000
) -> np.ndarray:
    """Write a collection with document `text n of seed` at vector n, and return the vectors.

    From `threshold` documents on, Chroma writes vector files in a folder.
    """
    vectors = unit_vectors(seed, count)
    with connect(place, create=True) as client:
        handle = client.create_collection(
            NAME,
            embedding_function=None,
            configuration={"hnsw": {"space": "cosine", "sync_threshold": threshold}},
        )
        handle.add(
            ids=[str(n) for n in range(count)],
            embeddings=vectors,
            documents=[text_of(n, seed) for n in range(count)],
            metadatas=[{"title": f"title {n}"} for n in range(count)],
        )
        handle.modify(metadata=collection_info(f"version-{seed}", count).to_metadata())
    return vectors


def written_index(place: ChromaPlace | Path | str, texts: Sequence[str], vectors: np.ndarray) -> Path:
    """Write texts with their vectors as an index build does, to `place`, and return its journal."""
    return written_target(Collection(ChromaPlace.parse(place), NAME), texts, vectors)


def written_target(
    target: Collection | FaissFolder, texts: Sequence[str] | Mapping[int, str], vectors: np.ndarray
) -> Path:
    """Write texts (by number) with their vectors as an index build does, and return its journal."""
    path = Path(tempfile.mkdtemp()) / "journal.sqlite3"
    numbered = texts.items() if isinstance(texts, Mapping) else enumerate(texts)
    records = ({"id": str(number), "title": f"title {number}", "text": text} for number, text in numbered)
    corpus = Corpus(write_jsonl(path.with_name("corpus.jsonl"), records))
    with closing(IndexJournal(path)) as journal:
        journal.survey(corpus)
        journal.select_unsplit()
        journal.add_chunks(
            (document, digest, [Chunk(document.id, document.title, document.text, 1, 1, 0)])
            for document, digest in journal.read_unsplit(corpus)
        )
        units, done = journal.make_units(), 0
        for unit in range(units):
            rows = journal.unembedded(unit)
            journal.add_vectors(rows, vectors[done : done + len(rows)])
            done += len(rows)
        made = collection_info("version", len(texts))
        info = replace(made, dimension=vectors.shape[1], draws=target.draws)
        if isinstance(target, FaissFolder) or target.folder:
            target.write_folder(journal, info, False, units, path.parent / "index")
        else:
            write(
                target, target.place, journal, info, False, (journal.embedded(unit) for unit in range(units))
            )
    return path


def text_of(number: int, seed: int = 0) -> str:
    return f"text {number} of {seed}"


class ChromaServer:
    """`chroma run` over a folder, on one loopback port, to be stopped and restarted."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("chroma")), "run", "--path", str(self.folder)]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OTEL_SDK_DISABLED": "true"},
        )
        ends = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/api/v2/heartbeat", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                assert self._process.poll() is None and time.monotonic() < ends, "chroma run did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        """Kill it, as on the loss of its machine."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def chroma_server(folder: Path, port: int) -> Iterator[ChromaServer]:
    server = ChromaServer(folder, port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
