"""Tests of index builds share these: the passages that were embedded, contents, and processes that die."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from search.chroma.location import ChromaPlace
from search.chroma.store import open_collection
from search.embedders import Embedder

# A server process that has imported everything once, and is forked from for each run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["search.indexing.shards", "sentence_transformers", "tiny_embedder"])


def killed(run: Callable[..., None], *arguments: Any) -> None:
    process = PROCESSES.Process(target=run, args=arguments)
    process.start()
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL


def record_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the passages that this process embeds from now on."""
    passages: list[str] = []
    encode = Embedder.encode_passages

    def recording(self: Embedder, texts: Sequence[str]) -> np.ndarray:
        passages.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(Embedder, "encode_passages", recording)
    return passages


def collection_contents(place: Any, name: str = "wiki") -> tuple[Any, dict[str, Any]]:
    with open_collection(ChromaPlace.parse(place), name) as store:
        found = store.collection.get(include=["documents", "metadatas", "embeddings"])
        rows = zip(found["ids"], found["documents"], found["metadatas"], found["embeddings"], strict=True)
        return store.info, {
            key: (text, metadata, np.float32(vector).tobytes()) for key, text, metadata, vector in rows
        }
