"""The index, in Chroma or FAISS, and the retrieval service over it."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.key import CONVERSING, SAMPLING, TORCH_DEVICE, Number, group, key

MAX_TOPK = 100
"""As `search.wire.MAX_TOPK`: the service refuses a query that asks for more."""
OF_OWN_SERVICE = tuple(
    f"retrieval.{name}"
    for name in (
        *("host", "port", "encoders", "threads", "max_batch", "window_ms", "max_queue", "cache_mb"),
        *("access_log", "startup_budget_s", "restarts"),
    )
)
"""What only a service that the run starts itself reads."""


@dataclass
class ChromaQuota:
    """What a Chroma server allows; a folder has no quotas."""

    records: int | None = key(
        None,
        "Records that a collection may have: an index that would need more is refused before anything is "
        "embedded, with the chroma.shards that fit. Chroma Cloud's default is 5000000.",
        low=1,
    )
    reads: int | None = key(
        None,
        "Queries that are sent to one server at once, of all shards together; others wait. Chroma Cloud's "
        "default is 10.",
        low=1,
    )
    page: int = key(
        250,
        "Records of one call that writes an index, or pages over one. Chroma Cloud's default is 300.",
        low=1,
    )


@dataclass
class Chroma:
    """The Chroma index that the retrieval service serves, with index=chroma."""

    path: Any = key(
        "${paths.corpus}/chromadb",
        "The folder of the index, or the address of a Chroma server: http(s)://HOST[:PORT], for Chroma Cloud "
        "https://api.trychroma.com/TENANT/DATABASE with the API key in the environment variable "
        "CHROMA_API_KEY. With chroma.shards also a list of such places, which get a shard in turn.",
        pattern=(r"(?!None$)(?!\{).+", "a folder, an address, or a list of them"),
    )
    collection: str = key("corpus", "The collection in it.", results=CONVERSING)
    shards: int = key(
        1,
        "Collections that the index is divided into, each a complete Chroma: a folder shard-NN-of-NN below "
        "chroma.path, or a collection of that name on a server. They are filled and asked at once. An index "
        "keeps the number that it was built with.",
        low=1,
        high=99,
        results=CONVERSING,
    )
    quota: ChromaQuota = group(ChromaQuota)


@dataclass
class Faiss:
    """The FAISS index that the retrieval service serves, with index=faiss."""

    path: str = key(
        "${paths.corpus}/faiss",
        "The index: a folder, as prepare-data builds it, or a file of FAISS such as e5_Flat.index, whose row "
        "i is line i of its corpus.",
    )
    corpus: str | None = key(
        None,
        "The JSONL of its passages, a line each: {id, contents}, or {id, title, text}; null is the one next "
        "to the index.",
    )
    ef_search: int = key(
        256, "Candidates that a query inspects in an HNSW index: more find more.", low=1, results=CONVERSING
    )
    nprobe: int = key(
        64, "Lists that a query inspects in an IVF index: more find more.", low=1, results=CONVERSING
    )
    device: str = key(
        "cpu",
        "Where it is searched. cuda or cuda:N moves a flat or IVF index to that GPU if FAISS is built for "
        "GPUs (faiss-gpu in place of faiss-cpu) and the index fits what is free there; else it stays on the "
        "CPU, and the service's log says why.",
        pattern=(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N"),
    )


@dataclass
class Retrieval:
    """The retrieval service."""

    url: str | None = key(
        None,
        "Address of a retrieval service that runs already, such as https://search.example.com: the run "
        "searches there and starts none of its own. It is asked which index it serves; its token is in the "
        "environment variable RETRIEVAL_TOKEN.",
        pattern=(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", "http(s)://HOST[:PORT] without a user or a query"),
    )
    host: str = key("127.0.0.1", "Address to bind; only this machine can reach the default.")
    port: int | None = key(
        None, "Port; null takes 8000 when it is free, else any free one.", low=1024, high=65535
    )
    topk: int = key(3, "Passages per query.", low=1, high=MAX_TOPK, results=CONVERSING, journal=SAMPLING)
    response_limit: int = key(
        2048,
        "Characters of one tool response as the model sees it.",
        low=1,
        results=CONVERSING,
        journal=SAMPLING,
    )
    deadline_s: Number = key(60, "Seconds before a search counts as failed, retries included.", above=0)
    embedder: str = key(
        "intfloat/e5-large-v2",
        "Embedding model; it must be the one the index was built with, which an index of another tool does "
        "not record.",
        results=CONVERSING,
    )
    device: str = key(
        "cpu",
        "torch device of the embedding model; on cuda, several encoders take turns on the GPUs.",
        pattern=TORCH_DEVICE,
    )
    encoders: int = key(1, "Encoder processes; each holds the embedding model.", low=1)
    threads: int = key(8, "torch threads of each.", low=1)
    max_batch: int = key(64, "Queries that are encoded and searched for together, at most.", low=1)
    window_ms: Number = key(
        3,
        "Milliseconds that a batch may wait for queries that are known to be coming; a lone client never "
        "waits.",
        low=0,
    )
    max_queue: int = key(
        4096, "Queries that may wait; a request beyond that gets 503 at once, and its client retries.", low=1
    )
    cache_mb: int = key(
        256,
        "Memory for results in MiB, so that a query is answered once however many attempts ask it; 0 turns "
        "it off.",
        low=0,
    )
    access_log: bool = key(
        False, "A line of JSON per request in the service's log; the query itself is not in it."
    )
    startup_budget_s: Number = key(
        300, "Seconds to wait for a healthy service; loading an embedding model is most of it.", above=0
    )
    restarts: int = key(
        3,
        "How often in a row it is restarted when it crashes or hangs, while searches wait within their "
        "deadline.",
        low=0,
    )
