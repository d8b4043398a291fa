"""Encoder replicas: processes that hold the embedding model, seen from the server's event loop.

    async with EncoderPool(spec, replicas=2, threads=1, metrics=metrics) as pool:
        vectors = await pool.encode(["who founded Orrin"])

A model in the server's own process would share Python's lock with the HTTP layer and take the server with it
when it crashes. So each replica is a separate process (`search.serving.encoder_worker`) at the other end of a
socket pair, and the server imports no torch. The death of a replica is noticed at once, because its end of
the socket closes; its batch raises `EncoderDied`, and a new process is started, with growing pauses between
attempts, until one is ready.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

import msgspec
import numpy as np

from search.embedders import EmbedderError, EmbedderSpec, Prefixes
from search.serving.encoder_worker import (
    EncodeRequest,
    Failure,
    LoadRequest,
    ModelInfo,
    Vectors,
    pack,
    unpack,
)
from search.serving.metrics import Metrics

HUNG_S = 120.0
"""A batch that takes longer means that the device hangs: the process is killed and replaced."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_POLL_S = 0.02
_END_S = 1.0
"""How long to wait for killed processes to exit when the pool closes."""

log = logging.getLogger(__name__)


class EncoderDied(Exception):
    """The replica exited before it answered; the batch may be given to another."""


class EncodeFailed(Exception):
    """The model failed on these texts; the replica still works."""


class _Link(asyncio.Protocol):
    """Our end of a replica's socket: at most one request is open at a time."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._buffer = bytearray()
        self._reply: asyncio.Future[msgspec.Struct] | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other end is open."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for message in unpack(self._buffer):
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(EncoderDied())
        self._lost()

    async def ask(self, request: msgspec.Struct) -> msgspec.Struct:
        """Send a request, return its answer; raises EncoderDied if the other end closes first."""
        if self._transport is None:
            raise EncoderDied
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(pack(request))
        try:
            return await self._reply
        except asyncio.CancelledError:  # the answer would be taken for the next request's
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class _Replica:
    """One process, from its start to its exit."""

    def __init__(self, number: int, lost: Callable[["_Replica"], None]) -> None:
        self.number = number
        self.loaded = False
        self._link = _Link(lambda: lost(self))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, spec: EmbedderSpec, threads: int) -> ModelInfo:
        """Start the process and load the model.

        Raises EmbedderError, EncoderDied if the process exits meanwhile, OSError if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Not in a thread: the kernel's parent-death signal is sent when the starting thread ends.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "search.serving.encoder_worker"],
                    stdin=theirs.fileno(),
                    # The tokenizer's threads, one per core, would compete with the other replicas.
                    env={"TOKENIZERS_PARALLELISM": "false", **os.environ},
                )
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=ours)
        except BaseException:
            ours.close()
            raise
        request = LoadRequest(asdict(spec), self.number, threads, os.getpid())
        answer = await self._link.ask(request)
        if isinstance(answer, Failure):
            raise EmbedderError(answer.reason)
        assert isinstance(answer, ModelInfo)
        if not self._link.is_open:  # it died right after its answer
            raise EncoderDied
        self.loaded = True
        return answer

    @property
    def ready(self) -> bool:
        """Whether it answers, busy or idle."""
        return self.loaded and self._link.is_open

    async def encode(self, texts: list[str], passages: bool) -> bytes:
        """Return the float32 rows of the texts; raises EncoderDied, or EncodeFailed with the reason."""
        try:
            async with asyncio.timeout(HUNG_S):
                answer = await self._link.ask(EncodeRequest(texts, passages))
        except TimeoutError:
            log.error("encoder %d gave no answer for %g s", self.number, HUNG_S)
            raise EncoderDied from None
        if isinstance(answer, Failure):
            raise EncodeFailed(answer.reason)
        assert isinstance(answer, Vectors)
        return answer.rows

    async def end(self) -> int | None:
        """Kill the process if it runs, and return its exit code; None if it was never started."""
        self._link.close()
        if self._process is None:
            return None
        self._process.kill()
        # Not `wait`, which would block the event loop while a device driver keeps the process from exiting.
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code


class EncoderPool:
    """The replicas of one embedder, an async context manager; `threads` is torch threads per replica."""

    def __init__(self, spec: EmbedderSpec, replicas: int, threads: int, metrics: Metrics) -> None:
        self.spec = spec
        self.size = replicas
        self._threads = threads
        self._metrics = metrics
        self._replicas: set[_Replica] = set()
        self._idle: list[_Replica] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._closing = False
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def ready(self) -> int:
        """Number of replicas that answer, busy or idle."""
        return sum(replica.ready for replica in self._replicas)

    async def __aenter__(self) -> "EncoderPool":
        """Start all replicas at once; raises EmbedderError if the model cannot be loaded."""
        self._metrics.encoders_ready.set_function(lambda: self.ready)
        starts = [asyncio.create_task(self._start(number)) for number in range(self.size)]
        try:
            self.model = (await asyncio.gather(*starts))[0]
        except EncoderDied:
            await self._stop(starts)
            raise EmbedderError(
                f"the encoder process of {self.spec.name!r} died while it loaded the model: "
                "its last output is above; the usual reason is lack of memory"
            ) from None
        except OSError as error:
            await self._stop(starts)
            raise EmbedderError(f"an encoder process cannot be started ({error})") from error
        except BaseException:  # also a cancellation: no process may be left
            await self._stop(starts)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all processes."""
        await self._stop([])

    async def encode(self, texts: Sequence[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors, float32, shape (len(texts), dimension).

        Call it at most `ready` times at once. Raises EncoderDied or EncodeFailed.
        """
        if not self._idle:
            raise EncoderDied
        replica = self._idle.pop()
        try:
            rows = await replica.encode(list(texts), passages)
        finally:
            if replica.ready:
                self._idle.append(replica)
        return np.frombuffer(rows, dtype=np.float32).reshape(len(texts), self.model.dimension)

    async def _start(self, number: int) -> ModelInfo:
        replica = _Replica(number, self._on_lost)
        self._replicas.add(replica)
        try:
            model = await replica.start(self.spec, self._threads)
        except Exception:  # a cancellation comes from `_stop`, which ends all remaining ones
            await self._end(replica)
            raise
        self._idle.append(replica)
        self.on_ready()
        return model

    def _on_lost(self, replica: _Replica) -> None:
        """Restart a replica whose socket has closed; called once for each."""
        if replica in self._idle:
            self._idle.remove(replica)
        if replica.loaded and not self._closing:  # for one that is loading, `_start` reports it
            task = asyncio.create_task(self._replace(replica))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _replace(self, replica: _Replica) -> None:
        self._metrics.encoder_restarts.inc()
        code = await self._end(replica)
        log.error("encoder %d died (exit code %s): starting another", replica.number, code)
        pause, started = _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                await self._start(replica.number)
            except (EncoderDied, EmbedderError, OSError) as error:
                reason = str(error) or "it died while it loaded the model"
                log.error(
                    "encoder %d does not start: %s; next attempt in %g s", replica.number, reason, pause
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                log.info("encoder %d is back after %.1f s", replica.number, time.monotonic() - started)
                return

    async def _stop(self, starts: Sequence[asyncio.Task[ModelInfo]]) -> None:
        self._closing = True
        tasks = [*starts, *self._restarts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._idle.clear()
        ends = [asyncio.create_task(self._end(replica)) for replica in self._replicas]
        if ends:
            await asyncio.wait(ends, timeout=_END_S)

    async def _end(self, replica: _Replica) -> int | None:
        code = await replica.end()
        self._replicas.discard(replica)
        return code


class PooledEmbedder:
    """The pool in the form of an embedder, for `Store.check_embedder`; not for the event loop's thread."""

    def __init__(self, pool: EncoderPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        model = pool.model
        self.name = model.name
        self.revision = model.revision
        self.dimension = model.dimension
        self.prefixes = Prefixes(model.query_prefix, model.passage_prefix)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of the passages; raises EmbedderError if the model or its process fails."""
        try:
            return asyncio.run_coroutine_threadsafe(
                self._pool.encode(texts, passages=True), self._loop
            ).result()
        except (EncoderDied, EncodeFailed) as error:
            reason = str(error) or "its process died"
            raise EmbedderError(f"embedder {self.name!r} cannot embed a passage: {reason}") from error
