"""One encoder replica: a process that turns texts into vectors for `search.serving.encoders`.

Its stdin is a socket: requests are pickles, answers eight bytes of length and a pickle. It ignores SIGTERM
and SIGINT: a stop of the process group must not kill the encoder of open requests.
"""

import os
import pickle
import signal
import sys
from dataclasses import replace

import numpy as np
from setproctitle import setproctitle

from drzero.ops.process.keeper import die_with
from search.embedders import Embedder, EmbedderError
from search.serving.encoders import CANARY, EncodeFailed, EncodeRequest, LoadRequest, ModelInfo


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
            info = ModelInfo(embedder.name, embedder.revision, embedder.dimension, embedder.prefixes)
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
        return encode(request.texts)
    except Exception as error:  # a text or a device that fails: the server finds out which by repeating
        return EncodeFailed(_one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Skip Python's own ending, in which a broken device's driver may hang.
    os._exit(code)
