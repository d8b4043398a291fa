"""Embedding through Ray: the same collection as from one process, and nothing left running."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from tiny_embedder import save_tiny_embedder
from watch import Watch

from search.chroma.store import open_collection
from search.indexing.chunking import Chunking
from search.indexing.shards import build_index

DOCUMENTS = 600


@pytest.mark.slow("a start of Ray")
def test_two_workers_give_the_collection_of_one_process_and_leave_nothing_running(tmp_path):
    spec = save_tiny_embedder(tmp_path / "tiny")
    source = tmp_path / "corpus.jsonl"
    records = [{"id": f"d{n}", "text": f"Passage {n} of many. " * (n % 9 + 1)} for n in range(DOCUMENTS)]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    build_index(source, tmp_path / "one", "wiki", spec, chunking=Chunking(64, 8))
    command = [sys.executable, "-m", "search.index", "--source", source, "--chroma-path", tmp_path / "two"]
    command += ["--collection", "wiki", "--embedder", spec.name, "--device", "cpu", "--workers", "2"]
    command += ["--chunk-tokens", "64", "--chunk-overlap", "8"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    watch = Watch()
    with subprocess.Popen([str(part) for part in command], env=environment) as indexing:
        while indexing.poll() is None:
            watch.poll(psutil.Process(indexing.pid))
            time.sleep(0.3)
    assert indexing.returncode == 0
    assert {address for address, _ in watch.listeners} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert watch.alive() == []
    with open_collection(tmp_path / "one", "wiki") as one, open_collection(tmp_path / "two", "wiki") as two:
        ours, theirs = (
            store.collection.get(include=["documents", "metadatas", "embeddings"]) for store in (one, two)
        )
        assert one.info == two.info
    for what in ("ids", "documents", "metadatas"):
        assert ours[what] == theirs[what]
    np.testing.assert_allclose(ours["embeddings"], theirs["embeddings"], atol=1e-6)
