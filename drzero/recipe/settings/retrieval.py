"""The index, in Chroma or FAISS, and the retrieval service over it."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.key import CONVERSING, SAMPLING, TORCH_DEVICE, Number, group, key

MAX_TOPK = 100  # as `search.wire.MAX_TOPK`: the service refuses a query that asks for more
SHARED = ("url", "topk", "response_limit", "deadline_s", "embedder", "device")
"""Keys of `retrieval` that a run also reads when another service searches for it."""


@dataclass
class ChromaQuota:
    """Quotas of a Chroma server. A folder has none."""

    records: int | None = key(None, "Most records per collection (Chroma Cloud: 5000000).", low=1)
    reads: int | None = key(None, "Concurrent queries to one server (Chroma Cloud: 10).", low=1)
    page: int = key(250, "Records per read or write call (Chroma Cloud: 300).", low=1)


@dataclass
class Chroma:
    """The Chroma index, with index=chroma."""

    path: Any = key(
        "${paths.corpus}/chromadb",
        "The index's folder, or a server: http(s)://HOST[:PORT]. Chroma Cloud: "
        "https://api.trychroma.com/TENANT/DATABASE with CHROMA_API_KEY set.",
        pattern=(r"(?!None$)(?!\{).+", "a folder, an address, or a list of them for shards"),
    )
    collection: str = key("corpus", "Its collection.", results=CONVERSING)
    shards: int = key(
        1,
        "Collections the index is split into. An index keeps the number it was built with.",
        low=1,
        high=99,
        results=CONVERSING,
    )
    quota: ChromaQuota = group(ChromaQuota)


@dataclass
class Faiss:
    """The FAISS index, with index=faiss."""

    path: str = key("${paths.corpus}/faiss", "prepare-data's folder, or a file such as e5_Flat.index.")
    corpus: str | None = key(None, "JSONL of passages, {id, contents} or {id, title, text}.")
    ef_search: int = key(256, "Candidates per query (HNSW).", low=1, results=CONVERSING)
    nprobe: int = key(64, "Lists searched per query (IVF).", low=1, results=CONVERSING)
    device: str = key(
        "cpu",
        "Where to search. Without faiss-gpu, or room for the index, cuda falls back to the CPU.",
        pattern=(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N"),
    )


@dataclass
class Retrieval:
    """The retrieval service."""

    url: str | None = key(
        None,
        "Address of a running service to use instead of starting one. Its token goes in RETRIEVAL_TOKEN.",
        pattern=(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", "http(s)://HOST[:PORT] without a user or a query"),
    )
    host: str = key("127.0.0.1", "Address to bind.")
    port: int | None = key(None, "Port; null takes 8000, or any free port.", low=1024, high=65535)
    topk: int = key(3, "Passages per query.", low=1, high=MAX_TOPK, results=CONVERSING, journal=SAMPLING)
    response_limit: int = key(2048, "Characters of a response.", low=1, results=CONVERSING, journal=SAMPLING)
    deadline_s: Number = key(60, "Seconds before a search counts as failed, retries included.", above=0)
    embedder: str = key("intfloat/e5-large-v2", "Embedding model of the index.", results=CONVERSING)
    device: str = key("cpu", "Device of the embedding model.", pattern=TORCH_DEVICE)
    encoders: int = key(1, "Encoder processes; each loads the embedding model.", low=1)
    threads: int = key(8, "torch threads per encoder.", low=1)
    max_batch: int = key(64, "Queries encoded together.", low=1)
    window_ms: Number = key(3, "Milliseconds a batch waits for queries on their way.", low=0)
    max_queue: int = key(4096, "Queries that may wait; beyond that, 503 and a retry.", low=1)
    cache_mb: int = key(256, "Result cache in MiB; 0 turns it off.", low=0)
    access_log: bool = key(False, "Log each request as JSON, without the query.")
    startup_budget_s: Number = key(300, "Seconds to wait for a healthy service.", above=0)
    restarts: int = key(3, "Restarts in a row after a crash or hang.", low=0)
