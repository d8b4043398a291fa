"""Tests of index builds share these: the passages that were embedded, contents, and processes that die."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from search.chroma.location import ChromaPlace
from search.chroma.store import open_collection
from search.embedders import Embedder
from search.indexing.journal import IndexJournal, Survey
from search.sources.corpus import Corpus

# A server process that has imported everything once, and is forked from for each run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["search.indexing.shards", "sentence_transformers", "tiny_embedder"])


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """Write a record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def harbour_corpus(path: Path, documents: int, changed: int = 0, every: int = 50) -> Path:
    """Write documents, one in `every` of several chunks. The last `changed` have another text."""
    records = []
    for number in range(documents):
        about = number + (number >= documents - changed)
        text = f"Passage {about} tells of the harbour of {about * 7919}. " * (1 if number % every else 20)
        records.append({"id": f"d{number}", "title": f"Title {number}" * (number % 3 > 0), "text": text})
    return write_jsonl(path, records)


def survey(corpus: Corpus) -> Survey:
    """The first step of an index build, with its own journal."""
    with TemporaryDirectory() as folder, closing(IndexJournal(Path(folder) / "journal")) as journal:
        return journal.survey(corpus)


def killed(run: Callable[..., None], *arguments: Any) -> None:
    process = PROCESSES.Process(target=run, args=arguments)
    process.start()
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL


def die_at(owner: Any, name: str, call: int) -> None:
    """Kill this process at call number `call` of a method."""
    method, calls = getattr(owner, name), iter(range(1, 10**6))

    def dying(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **options)

    setattr(owner, name, dying)


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
