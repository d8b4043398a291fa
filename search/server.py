"""The retrieval server: Search-R1's wire format over a Chroma collection or a FAISS index.

    python -m search.server --chroma-path chromadb --collection wiki --port 8000
    python -m search.server --faiss-path e5_Flat.index --faiss-corpus wiki-18.jsonl --embedder …/e5-base-v2

RETRIEVAL_TOKEN is its bearer token, DRZERO_LOG_LEVEL the level of its log (DEBUG: tracebacks).
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
import uvloop
from setproctitle import setproctitle

from drzero.ops.bearer import bearer_of
from drzero.ops.connections import Connection
from drzero.ops.errors import UserError
from drzero.ops.proxies import check_proxies
from drzero.ops.text import LOOPBACK
from search.chroma.location import ChromaPlace, Quota, plain
from search.chroma.sharded_store import chroma_index
from search.embedders import Embedder, EmbedderError, EmbedderSpec
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.serving.app import RetrievalApp
from search.serving.batching import BatchLimits
from search.serving.encoders import EncoderPool, PooledEmbedder
from search.serving.metrics import Metrics
from search.serving.service import Retrieval, ServiceLimits
from search.stored_index import Index, StoredIndex
from search.wire import TOKEN_VARIABLE

DRAIN_S = 7.0  # Seconds for open requests after SIGTERM; supervisors usually send SIGKILL after ten
EXIT_S = 9.0  # Seconds from the signal to exit, even if a thread or a device hangs
INDEX_WAIT_S = 300.0
_POLL_S = 1.0
_BACKLOG = 2048
# Clients keep connections between training steps; closing one during a request is an error.
_KEEP_ALIVE_S = 75

log = logging.getLogger("search.server")


class _Server(uvicorn.Server):
    """Uvicorn that starts to drain at the signal."""

    def __init__(self, config: uvicorn.Config, retrieval: Retrieval) -> None:
        super().__init__(config)
        self._retrieval = retrieval
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        _exit_in_time()
        self._loop.call_soon_threadsafe(self._retrieval.drain, DRAIN_S)


def bind(host: str, port: int) -> socket.socket:
    """Bind without listening: connections are refused, instead of hanging, until the server is ready."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: a port beyond 65535
        listener.close()
        raise _no_port(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Accept connections. Raises StoreError if another server took the port meanwhile."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port, *_ = listener.getsockname()
        raise _no_port(host, port, error) from error


def _no_port(host: str, port: int, error: Exception) -> StoreError:
    reason = getattr(error, "strerror", None) or error
    return StoreError(
        f"cannot listen on {host} port {port} ({reason}): stop what uses it, or choose another with --port"
    )


def wait_for_store(index: Index, wait_s: float = INDEX_WAIT_S) -> StoredIndex:
    """Open the index, waiting up to `wait_s` seconds until it is ready. Raises StoreError."""
    ends, logged = time.monotonic() + wait_s, ""
    while True:
        try:
            return index.open()
        except StoreNotReady as error:
            if time.monotonic() >= ends:
                raise
            if str(error) != logged:
                logged = str(error)
                log.warning("waiting for the index, %g s at most: %s", wait_s, logged)
        time.sleep(_POLL_S)


def _exit_in_time() -> None:
    """Exit after `EXIT_S` seconds if the process is still running, and its encoders with it."""

    def exit() -> None:
        print(f"still running after {EXIT_S:g} s, so something hangs: exiting", file=sys.stderr, flush=True)
        os._exit(0)

    last = threading.Timer(EXIT_S, exit)
    last.daemon = True
    last.start()


def configure(app: RetrievalApp) -> uvicorn.Config:
    """Return the HTTP server's settings."""
    return uvicorn.Config(
        app,
        log_level=logging.getLogger("search").level,
        backlog=_BACKLOG,
        access_log=False,
        lifespan="off",
        http=Connection,
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(DRAIN_S) + 1,
    )


async def _serve(
    args: argparse.Namespace, token: str | None, listener: socket.socket, store: StoredIndex
) -> None:
    metrics = Metrics()
    if not (args.embedder or store.info.embedder):
        raise StoreError(f"{store.name!r} records no embedder: name the one that made it with --embedder")
    info = store.info
    # The index says what it was embedded with.
    prefixes = (info.query_prefix, info.passage_prefix) if info.embedder else (None, None)
    spec = EmbedderSpec(args.embedder or info.embedder, args.device, None, *prefixes)
    async with EncoderPool(spec, args.encoders, args.threads, metrics) as encoders:
        embedder = PooledEmbedder(encoders, asyncio.get_running_loop())
        await asyncio.to_thread(store.check_embedder, cast(Embedder, embedder))
        batch = BatchLimits(args.max_batch, args.max_queue, args.window_ms / 1000)
        limits = ServiceLimits(cache_bytes=args.cache_mb << 20, batch=batch)
        retrieval = Retrieval(store, encoders, metrics, limits)
        config = configure(RetrievalApp(retrieval, token, args.access_log))
        listen(listener)
        print(f"serving {store.info.documents} documents of {store.name!r} with {spec.name}", flush=True)
        try:
            await _Server(config, retrieval).serve(sockets=[listener])
        finally:
            await retrieval.batcher.close()


def _at_least(lowest: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m search.server", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--chroma-path", nargs="+", help="Chroma folder or server address; for shards several")
    which.add_argument("--faiss-path", help="FAISS index: a file, or a folder as built by search.index")
    add("--collection", help="collection of the Chroma to serve")
    add("--shards", type=_at_least(1), default=1, help="shards of the collection (default: %(default)s)")
    add("--chroma-reads", type=_at_least(1), help="queries to a Chroma server at once (default: any number)")
    add("--faiss-corpus", help="JSONL of the index's passages (default: the one next to it)")
    add("--lines-folder", type=Path, help="where its line offsets go if its own folder is read-only")
    add("--ef-search", type=_at_least(1), default=256, help="candidates of HNSW (default: %(default)s)")
    add("--nprobe", type=_at_least(1), default=64, help="lists of IVF a query (default: %(default)s)")
    add("--faiss-device", default="cpu", help="cpu, or cuda[:N] with faiss-gpu (default: %(default)s)")
    add("--embedder", help="hub id or folder (default: the one that built the collection)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--device", help="torch device (default: CUDA if available)")
    add("--encoders", type=_at_least(1), default=1, help="encoder processes (default: %(default)s)")
    add("--threads", type=_at_least(1), default=1, help="torch threads per encoder (default: %(default)s)")
    add("--max-batch", type=_at_least(1), default=64, help="queries per batch (default: %(default)s)")
    window_help = "longest wait for a batch to fill (default: %(default)s)"
    add("--window-ms", type=_at_least(0, float), default=3.0, help=window_help)
    add("--max-queue", type=_at_least(1), default=4096, help="queries that may wait (default: %(default)s)")
    add("--cache-mb", type=_at_least(0), default=256, help="cache of results, 0: none (default: %(default)s)")
    add("--access-log", action="store_true", help="a JSON line per request on stdout")
    return parser


def index_of(args: argparse.Namespace) -> Index:
    """Return the index that the arguments name. Raises StoreError for a Chroma without a collection."""
    if args.faiss_path is None:
        if args.collection is None:
            raise StoreError("a Chroma has collections: name one with --collection")
        quota = Quota(reads=args.chroma_reads)
        places = [ChromaPlace.parse(path).within(quota) for path in args.chroma_path]
        return chroma_index(places, args.collection, args.shards)
    from search.faiss.store import FaissIndex  # an index of Chroma needs no FAISS

    return FaissIndex(
        args.faiss_path, args.faiss_corpus, args.lines_folder, args.ef_search, args.nprobe, args.faiss_device
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line until SIGTERM or SIGINT. Returns the exit code."""
    args = parser().parse_args(argv)
    try:
        check_proxies()
        token = bearer_of(TOKEN_VARIABLE)
        logging.getLogger("search").setLevel(os.environ.get("DRZERO_LOG_LEVEL", "INFO").upper())
    except (UserError, ValueError) as error:
        parser().error(str(error))
    if token is None and args.host not in LOOPBACK:
        parser().error(f"--host {args.host}: other machines may reach it there, so set {TOKEN_VARIABLE}")
    setproctitle("drzero: retrieval")
    logging.basicConfig(format="%(levelname)s:     %(message)s")

    def stop_early(*_: object) -> None:
        _exit_in_time()
        sys.exit(0)

    # While serving, uvicorn handles the signal, and raises it again after its orderly shutdown.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_early)
    try:
        with bind(args.host, args.port) as listener, closing(wait_for_store(index_of(args))) as store:
            if not store.check_content():
                log.warning("no hashes of %r were recorded, as an index built here has them", store.name)
            uvloop.run(_serve(args, token, listener, store))
    except Exception as error:  # of many types from Chroma and the system; a start reports one line
        log.debug("refused", exc_info=True)
        ours = isinstance(error, (StoreError, StoreUnavailable, EmbedderError))
        print(f"error: {error if ours else plain(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
