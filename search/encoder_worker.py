"""One encoder replica: a process that turns texts into vectors, started and fed by `search.encoders`.

Its stdin is one end of a socket pair; frames go both ways over it (`pack`, `unpack`). The first frame in is
the `Order`, the first out a `Description` of the loaded model, or a `Failure`; then each `Job` is answered by
its `Vectors` or a `Failure`. The end of the stream ends the process, and the kernel kills it when the server
dies in the middle of a batch. SIGTERM and SIGINT are the server's to handle: a stop of the whole process
group must not take away the encoder from the requests that the server still answers.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from setproctitle import setproctitle

from search.embedders import Embedder, EmbedderError, EmbedderSpec

CANARY = "canary"
_HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Order(msgspec.Struct, tag=True):
    """What to load. Of several replicas on `cuda`, each takes the next of the devices."""

    spec: dict[str, Any]
    replica: int
    threads: int
    server_pid: int


class Description(msgspec.Struct, tag=True):
    """A loaded model. `folds` says that its tokenizer cannot see what `search.cache.fold` takes away."""

    name: str
    revision: str
    dimension: int
    query_prefix: str
    passage_prefix: str
    folds: bool


class Job(msgspec.Struct, tag=True):
    """Texts to encode, as queries or as passages."""

    texts: list[str]
    passages: bool = False


class Vectors(msgspec.Struct, tag=True):
    """float32 rows, one a text, in the order of the job."""

    rows: bytes


class Failure(msgspec.Struct, tag=True):
    """Why there is no answer, in one line."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Order | Description | Job | Vectors | Failure
)


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as a frame: four bytes of length, then MessagePack."""
    payload = _encoder.encode(message)
    return _HEADER.pack(len(payload)) + payload


def unpack(buffer: bytearray) -> Iterator[Any]:
    """Take the complete frames off the front of `buffer` and yield their messages."""
    while len(buffer) >= _HEADER.size:
        end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        payload = bytes(buffer[_HEADER.size : end])
        del buffer[:end]
        yield _decoder.decode(payload)


def split_by_length(texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the places of `texts` in groups of about one length, shortest first.

    A batch is padded to its longest text, so one long text among short ones would cost as much as a batch of
    long ones. A group's longest is at most twice its shortest, plus 64 characters (about a dozen tokens).
    """
    group: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: len(texts[place])):
        if group and len(texts[place]) > 2 * len(texts[group[0]]) + 64:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def tokenizer_folds(embedder: Embedder) -> bool:
    """Return whether the model provably sees no difference between a query and its `search.cache.fold`.

    BERT's normaliser drops case and control characters and its splitter drops white space, before anything
    else sees the text. Only special tokens are looked for earlier; all must have a bracket, which `fold`
    leaves alone. And a prefix must end in white space, so that white space at the query's start is nothing.
    """
    try:
        plan = json.loads(embedder.plain_tokenizer().to_str())
    except EmbedderError:  # a tokenizer that cannot be read
        return False
    normaliser, splitter = plan.get("normalizer") or {}, plan.get("pre_tokenizer") or {}
    prefix = embedder.prefixes.query
    return (
        (normaliser.get("type"), splitter.get("type")) == ("BertNormalizer", "BertPreTokenizer")
        and normaliser["lowercase"]
        and normaliser["clean_text"]
        and all("[" in token["content"] for token in plan["added_tokens"])
        and (not prefix or prefix[-1].isspace())
    )


def main() -> int:
    """Serve until the server closes the socket; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as link:
        messages = _receive(link)
        order = next(messages, None)
        if not isinstance(order, Order) or not _die_with(order.server_pid):
            return 1
        setproctitle(f"drzero: retrieval encoder {order.replica}")
        try:
            embedder = _load(order)
        except EmbedderError as error:
            link.sendall(pack(Failure(str(error))))
            return 2
        except Exception as error:  # torch has no common kind for a device that is not there or has no memory
            reason = f"embedder {order.spec['name']!r} could not be loaded: {_one_line(error)}"
            link.sendall(pack(Failure(reason)))
            return 2
        link.sendall(pack(_describe(embedder)))
        for job in messages:
            answer = _answer(embedder, job)
            link.sendall(pack(answer))
            if isinstance(answer, Failure) and isinstance(_answer(embedder, Job([CANARY])), Failure):
                print(f"encoder {order.replica}: beyond repair, ends: {answer.reason}", file=sys.stderr)
                return 3
    return 0


def _receive(link: socket.socket) -> Iterator[Any]:
    buffer = bytearray()
    while chunk := link.recv(1 << 20):
        buffer += chunk
        yield from unpack(buffer)


def _die_with(server_pid: int) -> bool:
    """Ask the kernel to kill this process when the server dies; return False if it died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == server_pid


def _load(order: Order) -> Embedder:
    import torch

    torch.set_num_threads(order.threads)
    spec = EmbedderSpec(**order.spec)
    if spec.device in (None, "cuda") and (devices := torch.cuda.device_count()):
        spec = EmbedderSpec(**{**asdict(spec), "device": f"cuda:{order.replica % devices}"})
    embedder = Embedder(spec)
    embedder.load()
    embedder.encode_queries([CANARY])  # the first call is slow, and no request should be the one to pay
    return embedder


def _describe(embedder: Embedder) -> Description:
    prefixes = embedder.prefixes
    return Description(
        name=embedder.name,
        revision=embedder.revision,
        dimension=embedder.dimension,
        query_prefix=prefixes.query,
        passage_prefix=prefixes.passage,
        folds=tokenizer_folds(embedder),
    )


def _answer(embedder: Embedder, job: Job) -> Vectors | Failure:
    try:
        vectors = np.empty((len(job.texts), embedder.dimension), dtype=np.float32)
        for places in split_by_length(job.texts):
            texts = [job.texts[place] for place in places]
            vectors[places] = (
                embedder.encode_passages(texts) if job.passages else embedder.encode_queries(texts)
            )
    except Exception as error:  # a text or a device that fails: the server tells which, by asking again
        return Failure(_one_line(error))
    return Vectors(vectors.tobytes())


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    raise SystemExit(main())
