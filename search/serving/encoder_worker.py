"""One encoder replica: a process that turns texts into vectors, started and fed by `search.serving.encoders`.

Its stdin is one end of a socket pair that carries frames in both directions (`pack`, `unpack`). The first
frame in is the `LoadRequest`, the first out a `ModelInfo` or a `Failure`; then each `EncodeRequest` is
answered by its `Vectors` or a `Failure`. The end of the stream ends the process, and the kernel kills it when
the server dies in the middle of a batch. It ignores SIGTERM and SIGINT, which are the server's to handle: a
stop of the whole process group must not kill the encoder of requests that the server still answers.
"""

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from setproctitle import setproctitle

from ops.process.keeper import die_with
from search.embedders import Embedder, EmbedderError, EmbedderSpec

CANARY = "canary"
_HEADER = struct.Struct("!I")


class LoadRequest(msgspec.Struct, tag=True):
    """What to load. Of several replicas on `cuda`, each takes the next of the devices."""

    spec: dict[str, Any]
    replica: int
    threads: int
    server_pid: int


class ModelInfo(msgspec.Struct, tag=True):
    """A loaded model. `folds`: `search.serving.cache.fold` does not change its tokens."""

    name: str
    revision: str
    dimension: int
    query_prefix: str
    passage_prefix: str
    folds: bool


class EncodeRequest(msgspec.Struct, tag=True):
    """Texts to encode, as queries or as passages."""

    texts: list[str]
    passages: bool = False


class Vectors(msgspec.Struct, tag=True):
    """float32 rows, one per text, in the order of the request."""

    rows: bytes


class Failure(msgspec.Struct, tag=True):
    """Why there is no answer, in one line."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    LoadRequest | ModelInfo | EncodeRequest | Vectors | Failure
)


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as a frame: four bytes of length, then MessagePack."""
    payload = _encoder.encode(message)
    return _HEADER.pack(len(payload)) + payload


def unpack(buffer: bytearray) -> Iterator[Any]:
    """Remove the complete frames from the front of `buffer` and yield their messages."""
    while len(buffer) >= _HEADER.size:
        end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        payload = bytes(buffer[_HEADER.size : end])
        del buffer[:end]
        yield _decoder.decode(payload)


def split_by_length(texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the positions of `texts` in groups of similar length, shortest first.

    A batch is padded to its longest text, so one long text among short ones would cost as much as a batch of
    long ones. A group's longest is at most twice its shortest, plus 64 characters (about a dozen tokens).
    """
    group: list[int] = []
    for position in sorted(range(len(texts)), key=lambda position: len(texts[position])):
        if group and len(texts[position]) > 2 * len(texts[group[0]]) + 64:
            yield group
            group = []
        group.append(position)
    if group:
        yield group


def tokenizer_folds(embedder: Embedder) -> bool:
    """Return whether a query and its `search.serving.cache.fold` provably give the model the same tokens.

    BERT's normaliser drops case and control characters and its splitter drops white space, before anything
    else sees the text. Only special tokens are matched earlier; all must contain a bracket, which `fold`
    does not touch. And a prefix must end in white space, so that white space at the query's start is ignored.
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
        request = next(messages, None)
        if not isinstance(request, LoadRequest) or not die_with(request.server_pid, signal.SIGKILL):
            return 1
        setproctitle(f"drzero: retrieval encoder {request.replica}")
        try:
            embedder = _load(request)
            prefixes = embedder.prefixes
            info = ModelInfo(
                embedder.name,
                embedder.revision,
                embedder.dimension,
                prefixes.query,
                prefixes.passage,
                tokenizer_folds(embedder),
            )
        except Exception as error:  # torch has no common type for a missing device or one without memory
            reason = f"embedder {request.spec['name']!r} could not be loaded: {_one_line(error)}"
            link.sendall(pack(Failure(str(error) if isinstance(error, EmbedderError) else reason)))
            return 2
        link.sendall(pack(info))
        for job in messages:
            answer = _answer(embedder, job)
            link.sendall(pack(answer))
            canary = EncodeRequest([CANARY])
            if isinstance(answer, Failure) and isinstance(_answer(embedder, canary), Failure):
                print(f"encoder {request.replica}: beyond repair, exits: {answer.reason}", file=sys.stderr)
                return 3
    return 0


def _receive(link: socket.socket) -> Iterator[Any]:
    buffer = bytearray()
    while chunk := link.recv(1 << 20):
        buffer += chunk
        yield from unpack(buffer)


def _load(request: LoadRequest) -> Embedder:
    import torch

    torch.set_num_threads(request.threads)
    spec = EmbedderSpec(**request.spec)
    if spec.device in (None, "cuda") and (devices := torch.cuda.device_count()):
        spec = replace(spec, device=f"cuda:{request.replica % devices}")
    embedder = Embedder(spec)
    embedder.load()
    embedder.encode_queries([CANARY])  # the first call is slow, and no request should pay for it
    return embedder


def _answer(embedder: Embedder, request: EncodeRequest) -> Vectors | Failure:
    encode = embedder.encode_passages if request.passages else embedder.encode_queries
    try:
        vectors = np.empty((len(request.texts), embedder.dimension), dtype=np.float32)
        for positions in split_by_length(request.texts):
            vectors[positions] = encode([request.texts[position] for position in positions])
    except Exception as error:  # a text or a device that fails: the server finds out which by repeating
        return Failure(_one_line(error))
    return Vectors(vectors.tobytes())


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    raise SystemExit(main())
