"""Parts for the tests of the retrieval service: a small collection, the server as a child process, and the
model in the test's own process."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from conftest import unused_port

from search.embedders import Embedder, EmbedderSpec
from search.indexing.shards import build_index
from search.wire import TOKEN_VARIABLE

SPEC = EmbedderSpec("packaged-minilm", "cpu")
COLLECTION = "wiki"
START_S = 240.0
PASSAGES = {
    "Orrin": "Orrin is a harbour town on the river Vell, known for its salt market.",
    "Mara Tesk": "Mara Tesk is the painter of The Blue Gate, finished in the winter of 1871.",
    "Hollin Works": "Hollin Works is a firm that builds steam ploughs.",
    "Vell": "The Vell is a river that rises in the Grey Fells and ends in the Ember Sea.",
    "Ada Quill": "Ada Quill is a violinist and conductor of the Sarn Orchestra.",
    "Sarn": "Sarn is the capital of the province of Lower Marl.",
    "The Glass Hour": "The Glass Hour is a novel about a clockmaker, written by Ivo Brand.",
    "Ivo Brand": "Ivo Brand is a novelist who was born in Teverly.",
    "Teverly": "Teverly is a village of beekeepers and honey merchants.",
    "Pell Bank": "Pell Bank is a bank that lends money to farmers.",
    "Nara Dunn": "Nara Dunn is a chemist who discovered a violet dye.",
    "Kestrel Line": "The Kestrel Line is a railway between Sarn and Orrin.",
}
QUESTIONS = {
    "who painted The Blue Gate?": "Mara Tesk",
    "which firm builds steam ploughs?": "Hollin Works",
    "novel about a clockmaker": "The Glass Hour",
    "chemist violet dye": "Nara Dunn",
    "railway between Sarn and Orrin": "Kestrel Line",
    "bank lending to farmers": "Pell Bank",
    "village of beekeepers": "Teverly",
    "violinist of the Sarn Orchestra": "Ada Quill",
}


def build_collection(folder: Path, spec: EmbedderSpec = SPEC) -> Path:
    """Index the passages, from a corpus in Search-R1's form, and return the Chroma folder."""
    contents = (f'"{title}"\n{text}' for title, text in PASSAGES.items())
    records = (json.dumps({"id": str(row), "contents": text}) for row, text in enumerate(contents))
    (folder / "corpus.jsonl").write_text("\n".join(records))
    build_index(folder / "corpus.jsonl", folder / "chroma", COLLECTION, spec)
    return folder / "chroma"


class Server:
    """`python -m search.server` on a free port of loopback, at `url`.

    Its output goes into a file: a full pipe that nobody reads would block it.
    """

    def __init__(
        self,
        index: Path | str,
        *more: str,
        collection: str = COLLECTION,
        port: int = 0,
        flag: str = "--chroma-path",
        environment: Mapping[str, str] = {},
    ) -> None:
        port = port or unused_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "search.server", flag, str(index), "--device", "cpu"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as this object
        self.process = subprocess.Popen(
            [*command, "--collection", collection, "--port", str(port), *more],
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def wait_healthy(self) -> None:
        wait_for(self.is_healthy, START_S, or_else=self.is_over)

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def encoders(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> tuple[int, str]:
        self.process.terminate()
        return self.ended(30)

    def ended(self, limit_s: float) -> tuple[int, str]:
        return self.process.wait(timeout=limit_s), self.errors

    @property
    def errors(self) -> str:
        return os.pread(self._errors.fileno(), 1 << 24, 0).decode()


@contextmanager
def serving_with_token(chroma: Path, token: str) -> Iterator[str]:
    """Yield the address of a server that asks for a token, which only its own environment has."""
    with serving(chroma, environment={TOKEN_VARIABLE: token}) as server:
        yield server.url


@contextmanager
def serving(index: Path | str, *more: str, **options: Any) -> Iterator[Server]:
    server = Server(index, *more, **options)
    try:
        server.wait_healthy()
        yield server
    finally:
        if not server.is_over():
            server.end()


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a new event loop, for a minute at most."""
    return wraps(test)(lambda **given: asyncio.run(asyncio.wait_for(test(**given), 60)))


def wait_for(
    condition: Callable[[], object], limit_s: float, or_else: Callable[[], object] = lambda: False
) -> None:
    """Return once `condition` holds. Fails after `limit_s` seconds, or when `or_else` holds."""
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, f"the condition did not hold within {limit_s:g} s"
        assert not or_else(), "the condition cannot hold any more"
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_metric(url: str, name: str) -> float:
    """Return the value of a metric line, labels included, or 0 if it is missing."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10).text
    values = (line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} "))
    return float(next(values, 0.0))


class NearEncoders:
    """The model in this process, one batch at a time, for tests that are not about processes."""

    ready = 1

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.on_ready: Callable[[], None] = lambda: None
        self.batches: list[list[str]] = []

    async def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(texts))
        return await asyncio.to_thread(self._embedder.encode_queries, texts)
