"""One encoder replica: a process that turns texts into vectors for `search.serving.encoders`.

Its stdin is a socket: requests are pickles, answers eight bytes of length and a pickle. It ignores SIGTERM
and SIGINT: a stop of the process group must not kill the encoder of open requests.
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from setproctitle import setproctitle

from drzero.ops.process.keeper import die_with
from search.embedders import Embedder, EmbedderError
from search.serving.encoders import CANARY, EncodeFailed, EncodeRequest, LoadRequest, ModelInfo


def split_by_length(texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield positions of `texts` in groups, shortest first, up to twice the shortest plus 64 characters."""
    group: list[int] = []
    for position in sorted(range(len(texts)), key=lambda position: len(texts[position])):
        if group and len(texts[position]) > 2 * len(texts[group[0]]) + 64:
            yield group
            group = []
        group.append(position)
    if group:
        yield group


def tokenizer_folds(embedder: Embedder) -> bool:
    """Return whether `search.serving.service.fold` provably never changes a query's tokens.

    BERT's normaliser drops case and control characters, and its splitter drops white space. Only special
    tokens come earlier, and they contain a bracket. A prefix must end in white space.
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
    """Serve until the server closes stdin. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(0), "wb")

    def send(answer: ModelInfo | np.ndarray | Exception) -> None:
        payload = pickle.dumps(answer)
        answers.write(len(payload).to_bytes(8) + payload)
        answers.flush()

    try:
        request: LoadRequest = pickle.load(sys.stdin.buffer)
        if not die_with(request.server_pid, signal.SIGKILL):
            return 1
        setproctitle(f"drzero: retrieval encoder {request.replica}")
        try:
            embedder = _load(request)
            folds = tokenizer_folds(embedder)
            info = ModelInfo(embedder.name, embedder.revision, embedder.dimension, embedder.prefixes, folds)
        except Exception as error:  # torch has no common type for a missing device or one without memory
            reason = f"embedder {request.spec.name!r} could not be loaded: {_one_line(error)}"
            send(error if isinstance(error, EmbedderError) else EmbedderError(reason))
            return 2
        send(info)
        while True:
            answer = _answer(embedder, pickle.load(sys.stdin.buffer))
            send(answer)
            is_failure = isinstance(answer, EncodeFailed)
            if is_failure and isinstance(_answer(embedder, EncodeRequest([CANARY])), EncodeFailed):
                print(f"encoder {request.replica}: beyond repair, exits: {answer}", file=sys.stderr)
                return 3
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the server is gone, perhaps amid a request
        return 0


def _load(request: LoadRequest) -> Embedder:
    import torch

    torch.set_num_threads(request.threads)
    spec = request.spec
    if spec.device in (None, "cuda") and (devices := torch.cuda.device_count()):
        spec = replace(spec, device=f"cuda:{request.replica % devices}")
    embedder = Embedder(spec)
    embedder.encode_queries([CANARY])  # the first call is slow, and no request should pay for it
    return embedder


def _answer(embedder: Embedder, request: EncodeRequest) -> np.ndarray | EncodeFailed:
    encode = embedder.encode_passages if request.passages else embedder.encode_queries
    try:
        vectors = np.empty((len(request.texts), embedder.dimension), dtype=np.float32)
        for positions in split_by_length(request.texts):
            vectors[positions] = encode([request.texts[position] for position in positions])
    except Exception as error:  # a text or a device that fails: the server finds out which by repeating
        return EncodeFailed(_one_line(error))
    return vectors


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Skip Python's own ending, in which a broken device's driver may hang.
    os._exit(code)
