"""Encoder replicas: processes that hold the embedding model, seen from the server's event loop.

A model in the server's own process would share Python's lock with the HTTP layer and die with it. So each
replica is a process of its own (`search.encoder_worker`) at the other end of a socket pair, and the server
imports no torch. A replica that dies is noticed at once, since its end of the socket closes; the batch it had
raises `EncoderDied`, and a new process is started, again and again with growing pauses, until one is ready.
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
from search.encoder_worker import Description, Failure, Job, Order, Vectors, pack, unpack
from search.metrics import Metrics

HUNG_S = 120.0
"""A batch that takes longer than this means a device that hangs: the process is killed and replaced."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_POLL_S = 0.02
_END_S = 1.0
"""How long the end of killed processes is waited for when the pool closes."""

log = logging.getLogger(__name__)


class EncoderDied(Exception):
    """The replica ended before it answered; the batch may be given to another."""


class EncodeFailed(Exception):
    """The model failed on these texts; the replica goes on."""


class _Link(asyncio.Protocol):
    """Our end of a replica's socket: at most one question is open at a time."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._buffer = bytearray()
        self._reply: asyncio.Future[msgspec.Struct] | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is another end."""
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

    async def ask(self, question: msgspec.Struct) -> msgspec.Struct:
        """Send a message, return its answer; raises EncoderDied if the other end closes first."""
        if self._transport is None:
            raise EncoderDied
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(pack(question))
        try:
            return await self._reply
        except asyncio.CancelledError:  # its answer would come as the answer to the next question
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class _Replica:
    """One process, from its start to its death."""

    def __init__(self, number: int, lost: Callable[["_Replica"], None]) -> None:
        self.number = number
        self.loaded = False
        self._link = _Link(lambda: lost(self))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, spec: EmbedderSpec, threads: int) -> Description:
        """Start the process and load the model.

        Raises EmbedderError, EncoderDied if the process ends meanwhile, OSError if there is none to have.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Not from a thread: the kernel's parent-death signal follows the thread that starts it.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "search.encoder_worker"],
                    stdin=theirs.fileno(),
                    # The tokenizer's threads, one a core, would get in the way of the other replicas.
                    env={"TOKENIZERS_PARALLELISM": "false", **os.environ},
                )
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=ours)
        except BaseException:
            ours.close()
            raise
        answer = await self._link.ask(Order(asdict(spec), self.number, threads, os.getpid()))
        if isinstance(answer, Failure):
            raise EmbedderError(answer.reason)
        assert isinstance(answer, Description)
        if not self._link.is_open:  # it died right after its answer
            raise EncoderDied
        self.loaded = True
        return answer

    @property
    def ready(self) -> bool:
        """Whether it answers, at work or not."""
        return self.loaded and self._link.is_open

    async def encode(self, texts: list[str], passages: bool) -> bytes:
        """Return the float32 rows of the texts; raises EncoderDied, or EncodeFailed with the reason."""
        try:
            async with asyncio.timeout(HUNG_S):
                answer = await self._link.ask(Job(texts, passages))
        except TimeoutError:
            log.error("encoder %d gave no answer for %g s", self.number, HUNG_S)
            raise EncoderDied from None
        if isinstance(answer, Failure):
            raise EncodeFailed(answer.reason)
        assert isinstance(answer, Vectors)
        return answer.rows

    async def end(self) -> int | None:
        """Kill the process if it lives, and return how it ended; None if there never was one."""
        self._link.close()
        if self._process is None:
            return None
        self._process.kill()
        # Not `wait`, which would stop the event loop while a device driver keeps the process from dying.
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code


class EncoderPool:
    """The replicas of one embedder; an async context manager. `threads` are torch threads of each."""

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
        """Number of replicas that answer, at work or not."""
        return sum(replica.ready for replica in self._replicas)

    async def __aenter__(self) -> "EncoderPool":
        """Start all replicas at once; raises EmbedderError if the model cannot be loaded."""
        self._metrics.encoders_ready.set_function(lambda: self.ready)
        starts = [asyncio.create_task(self._start(number)) for number in range(self.size)]
        try:
            self.description = (await asyncio.gather(*starts))[0]
        except EncoderDied:
            await self._stop(starts)
            raise EmbedderError(
                f"the encoder process of {self.spec.name!r} died while it loaded the model: "
                "its last words are above; out of memory is the usual reason"
            ) from None
        except OSError as error:
            await self._stop(starts)
            raise EmbedderError(f"no encoder process can be started ({error})") from error
        except BaseException:  # also a cancellation: no process may stay
            await self._stop(starts)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all processes."""
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
        return np.frombuffer(rows, dtype=np.float32).reshape(len(texts), self.description.dimension)

    async def _start(self, number: int) -> Description:
        replica = _Replica(number, self._on_lost)
        self._replicas.add(replica)
        try:
            description = await replica.start(self.spec, self._threads)
        except Exception:  # a cancellation comes from `_stop`, which ends all that are left
            await self._end(replica)
            raise
        self._idle.append(replica)
        self.on_ready()
        return description

    def _on_lost(self, replica: _Replica) -> None:
        """Called once for each replica whose socket has closed."""
        if replica in self._idle:
            self._idle.remove(replica)
        if replica.loaded and not self._closing:  # one that is loading is the business of who starts it
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
                log.error("encoder %d does not start: %s; again in %g s", replica.number, reason, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                log.info("encoder %d is back after %.1f s", replica.number, time.monotonic() - started)
                return

    async def _stop(self, starts: Sequence[asyncio.Task[Description]]) -> None:
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
    """The pool as `Store.check_embedder` wants an embedder; to be used outside the event loop's thread."""

    def __init__(self, pool: EncoderPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        described = pool.description
        self.name = described.name
        self.revision = described.revision
        self.dimension = described.dimension
        self.prefixes = Prefixes(described.query_prefix, described.passage_prefix)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of the passages; raises EmbedderError if there are none."""
        try:
            return asyncio.run_coroutine_threadsafe(
                self._pool.encode(texts, passages=True), self._loop
            ).result()
        except (EncoderDied, EncodeFailed) as error:
            reason = str(error) or "its process died"
            raise EmbedderError(f"embedder {self.name!r} cannot embed a passage: {reason}") from error
