"""Retrieval under load: our server next to a plain one, a FAISS one, and the limit of encoder and index.

    python -m bench.retrieval                          # table, plot and text into bench/ (about 15 minutes)
    python -m bench.retrieval --soak 10                # our server at full load: memory, errors
    python -m bench.retrieval --seconds 5 --passages 2000 --only ours plain --clients 1 64 --dry

A demo world (bench/retrieval_world.py) is indexed once into outputs/bench. All peers have the same vectors,
the same model, one torch thread a process, and the same clients on the same machine. `ours` has one encoder
per core, and in a soak a small cache that fills early.

The limit is the cores' throughput at the best batches: cores / (encoder + index + HTTP core-seconds per
query). bench/alone.py measures encoder and index, HTTP is our server answering from its cache. The limit with
clients adds their CPU time.
"""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench import retrieval_report as report
from bench.closed_loop import Order
from bench.machine import cores
from bench.processes import Server, cpu_seconds, python, server
from bench.retrieval_report import WARM_UP_S, Row, Soak
from bench.retrieval_truth import Answer, Truth, export_vectors
from bench.retrieval_world import QUERIES_FILE, Queries, Stream
from data.demo_world import generate_world, write_world
from search.embedders import PACKAGED_EMBEDDER, EmbedderSpec
from search.indexing.shards import build_index

COLLECTION = "bench"
FOLDER = Path(__file__).parent.parent / "outputs" / "bench"
PEERS = ("ours", "plain", "flat")
FOR_RECALL = 1000
SAMPLE_S = 5.0
SOAK_CACHE_MB = 16


@dataclass
class Bench:
    """A prepared folder and the settings of the loads."""

    folder: Path
    embedder: str
    seconds: float
    flags: Sequence[str]
    truth: Truth
    base: int = 0

    def start(self, peer: str, log: Path) -> AbstractContextManager[Server]:
        """Start a peer."""
        chroma = ["--chroma-path", self.folder / "chroma", "--collection", COLLECTION]
        module, args = {
            "ours": ("search.server", [*chroma, *self.flags]),
            "plain": ("bench.plain_server", [*chroma, "--embedder", self.embedder]),
            "flat": ("bench.flat_server", ["--vectors", self.folder, "--embedder", self.embedder]),
        }[peer]
        return server(module, args, _free_port(), log)

    def load(self, peer: str, running: Server, stream: Stream, clients: int, work: Path) -> tuple[Row, int]:
        """Run the clients for `seconds` after a warm-up. Also returns the number of answers."""
        port = int(running.url.rsplit(":", 1)[1])
        record = work / "record.json"
        order = Order(port, clients, stream, self.base, str(self.folder / QUERIES_FILE), str(record))
        order.write(work / "order.json")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = python("bench.closed_loop", work / "order.json", **pipes)
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline().strip() != b"started":
            raise SystemExit(f"error: the clients of {peer} did not start")
        time.sleep(WARM_UP_S)
        before = (time.monotonic(), cpu_seconds(process.pid), *running.cpu_seconds())
        self.during(running)
        after = (time.monotonic(), cpu_seconds(process.pid), *running.cpu_seconds())
        process.stdin.close()
        process.wait()
        return self._row(peer, stream, clients, before, after, json.loads(record.read_text()))

    def during(self, running: Server) -> None:
        """Wait while the clients run."""
        time.sleep(self.seconds)

    def _row(
        self,
        peer: str,
        stream: Stream,
        clients: int,
        before: Sequence[float],
        after: Sequence[float],
        record: dict,
    ) -> tuple[Row, int]:
        begun, ended = np.asarray(record["begun"]), np.asarray(record["ended"])
        inside = (ended >= before[0]) & (ended < after[0])
        answered = max(int(inside.sum()), 1)
        latencies = 1000 * (ended - begun)[inside] if inside.any() else np.array([np.nan])
        wall, clients_cpu, server_cpu, encoders_cpu = (b - a for a, b in zip(before, after, strict=True))
        # The next load of the same server must not repeat its queries.
        self.base = 1 + max([*record["asked"], self.base])
        answers: list[Answer] = [(number, titles, scores) for number, titles, scores in record["answers"]]
        p50, p99 = (float(np.percentile(latencies, share)) for share in (50, 99))
        failed = sum(record["errors"].values()) + record["malformed"]
        for reason, count in record["errors"].items():
            print(f"  {peer}: {count} requests failed: {reason}", flush=True)
        per_query = 1000 / answered
        row = Row(
            peer,
            stream,
            clients,
            per_second=answered / wall,
            p50=p50,
            p99=p99,
            server_ms=server_cpu * per_query,
            encoders_ms=encoders_cpu * per_query,
            clients_ms=clients_cpu * per_query,
            refused=record["refused"],
            failed=failed,
            checked=self.truth.check(answers, FOR_RECALL),
        )
        return row, len(ended)


class SoakBench(Bench):
    """Samples the memory of the server's processes while the clients run."""

    memory: dict[str, list[tuple[float, float]]]

    def during(self, running: Server) -> None:
        """Sample memory until the time is over."""
        self.memory = {}
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < self.seconds:
            for number, process in enumerate(running.processes()):
                name = "server" if number == 0 else f"encoder {number - 1}"
                with suppress(psutil.NoSuchProcess):  # a dead encoder shows as requests that failed
                    pss = process.memory_full_info().pss / 2**20
                    self.memory.setdefault(name, []).append((elapsed, pss))
            time.sleep(min(SAMPLE_S, self.seconds))


def prepare(passages: int, embedder: str) -> Path:
    """Return a folder under outputs/bench with corpus, queries, index and exact vectors, created once."""
    folder = FOLDER / f"{passages}-{embedder.replace('/', '-')}"
    if not (folder / QUERIES_FILE).exists():
        world = generate_world(0, "run", passages=passages, chains_per_hop=0)
        write_world(world, folder)
        Queries.of(world, 0).write(folder / QUERIES_FILE)
    build = build_index(folder / "corpus.jsonl", folder / "chroma", COLLECTION, EmbedderSpec(embedder))
    if build.built or not (folder / "vectors.npy").exists():
        export_vectors(folder / "chroma", COLLECTION, folder)
    return folder


def alone(what: str, folder: Path, embedder: str, copies: int, seconds: float) -> dict[int, float]:
    """Return CPU milliseconds per query by batch size, the mean over `copies` concurrent processes."""
    args = [what, "--folder", folder, "--embedder", embedder, "--seconds", seconds]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [python("bench.alone", *args, **pipes) for _ in range(copies)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.stdout is not None
        outputs.append(json.loads(process.stdout.read().strip().split("\n")[-1]))
        process.wait()
    return {int(batch): float(np.mean([output[batch] for output in outputs])) for batch in outputs[0]}


def measure(bench: Bench, peers: Sequence[str], clients: Sequence[int]) -> list[Row]:
    """Measure the whole matrix, with a fresh server per peer and stream, and our cache last."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for peer in peers:
            streams: list[Stream] = ["distinct", "groups"] if peer != "flat" else ["distinct"]
            for stream in streams + (["same"] if peer == "ours" else []):
                bench.base = 0
                with bench.start(peer, work / f"{peer}.log") as running:
                    for count in clients:
                        row, _ = bench.load(peer, running, stream, count, work)
                        print(report.line(row), flush=True)
                        rows.append(row)
    return rows


def soak(bench: SoakBench, clients: int) -> Soak:
    """Run our server at full load without repeated queries."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        with bench.start("ours", work / "ours.log") as running:
            row, answered = bench.load("ours", running, "distinct", clients, work)
    return Soak(row, answered, bench.memory)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Measure, print, and write section and plot to bench/, unless --dry."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per load, after the warm-up")
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--embedder", default=PACKAGED_EMBEDDER)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--server-flags",
        default=f"--encoders {cores()}",
        help="flags of our server, in one string (default: %(default)s)",
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="soak our server instead")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing into bench/")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = prepare(args.passages, args.embedder)
    truth = Truth(folder, args.embedder)
    seconds = 60 * args.soak if args.soak else args.seconds
    flags = args.server_flags + (f" --cache-mb {SOAK_CACHE_MB}" if args.soak else "")
    about = report.About(args.passages, args.embedder, len(truth.queries), seconds, flags)
    make = SoakBench if args.soak else Bench
    bench = make(folder, args.embedder, seconds, flags.split(), truth)
    if isinstance(bench, SoakBench):
        report.publish_soak(about, soak(bench, max(args.clients)), write=not args.dry)
        return
    each = min(seconds, 5.0)
    costs = report.Costs(
        encoder=alone("encoder", folder, args.embedder, cores(), each),
        encoder_one=alone("encoder", folder, args.embedder, 1, each),
        index=alone("index", folder, args.embedder, cores(), each),
    )
    report.publish(about, measure(bench, args.only, args.clients), costs, write=not args.dry)


if __name__ == "__main__":
    main()
