"""Encoder replicas: processes with the embedding model, which would hold the server's Python lock."""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

from search.embedders import EmbedderError, EmbedderSpec, Prefixes
from search.serving.metrics import Metrics

CANARY = "canary"
HUNG_S = 120.0  # After this time the device hangs: the process is killed and replaced
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_POLL_S = 0.05
_END_S = 1.0  # How long to wait for killed processes at the end, because a device driver may keep one

log = logging.getLogger(__name__)


class EncoderDied(Exception):
    """The replica exited before it answered. Another may take the batch."""


class EncodeFailed(Exception):
    """The model failed on these texts. The replica still works."""


class LoadRequest(NamedTuple):
    """What to load. Replicas on `cuda` take turns on the devices."""

    spec: EmbedderSpec
    replica: int
    threads: int
    server_pid: int


class ModelInfo(NamedTuple):
    """A loaded model."""

    name: str
    revision: str
    dimension: int
    prefixes: Prefixes


class EncodeRequest(NamedTuple):
    """Texts to encode, as queries or passages. The answer is a float32 row per text."""

    texts: list[str]
    passages: bool = False


class _Replica:
    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = False  # whether it answers, busy or idle
        self._writer: asyncio.StreamWriter | None = None
        self._socket, theirs = socket.socketpair()
        try:
            # Not in a thread, whose end sends the parent-death signal. Not by the event loop, where a
            # cancelled start leaves its process running.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "search.serving.encoder_worker"],
                stdin=theirs.fileno(),
                # A tokenizer thread per core would compete with the other replicas.
                env={"TOKENIZERS_PARALLELISM": "false", **os.environ},
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    async def ask(self, request: LoadRequest | EncodeRequest) -> Any:
        """Return the answer. Raises EncoderDied if the process exits first, or the error that it sends."""
        try:
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
            if self._writer.is_closing():
                raise EncoderDied
            self._writer.write(pickle.dumps(request))
            size = int.from_bytes(await self._reader.readexactly(8))
            answer = pickle.loads(await self._reader.readexactly(size))
        except BaseException as error:
            self.kill()  # also when cancelled: the answer would be taken for the next request's
            if isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                raise EncoderDied from None
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.ready = False
        self._process.kill()

    async def exited(self) -> int:
        # `wait` would block the event loop while a driver keeps the process.
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        (self._writer or self._socket).close()
        return code


class EncoderPool:
    """The replicas of one embedder, an async context manager. `threads` are torch threads per replica."""

    def __init__(self, spec: EmbedderSpec, replicas: int, threads: int, metrics: Metrics) -> None:
        self.spec = spec
        self.size = replicas
        self._threads = threads
        self._metrics = metrics
        self._replicas: set[_Replica] = set()
        self._idle: list[_Replica] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def ready(self) -> int:
        """Number of replicas that answer, busy or idle."""
        return sum(replica.ready for replica in self._replicas)

    async def __aenter__(self) -> "EncoderPool":
        """Start all replicas at once. Raises EmbedderError if the model cannot be loaded."""
        self._metrics.encoders_ready.set_function(lambda: self.ready)
        starts = [self._run(self._start(number)) for number in range(self.size)]
        try:
            self.model = (await asyncio.gather(*starts))[0]
        except BaseException as error:  # also a cancellation: no process may be left
            await self.__aexit__()
            if isinstance(error, EncoderDied):
                raise EmbedderError(
                    f"the encoder process of {self.spec.name!r} died while it loaded the model: "
                    "its last output is above; the usual reason is lack of memory"
                ) from None
            if isinstance(error, OSError):
                raise EmbedderError(f"an encoder process cannot be started ({error})") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ends := [asyncio.create_task(self._end(replica)) for replica in self._replicas]:
            await asyncio.wait(ends, timeout=_END_S)

    async def encode(self, texts: Sequence[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors, float32, in up to `ready` calls at once. Raises EncoderDied, EncodeFailed."""
        if not self._idle:
            raise EncoderDied
        replica = self._idle.pop()
        try:
            async with asyncio.timeout(HUNG_S):
                vectors: np.ndarray = await replica.ask(EncodeRequest(list(texts), passages))
        except TimeoutError:
            log.error("encoder %d gave no answer for %g s", replica.number, HUNG_S)
            raise EncoderDied from None
        finally:
            if replica.ready:
                self._idle.append(replica)
        return vectors

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, number: int) -> ModelInfo:
        replica = _Replica(number)
        self._replicas.add(replica)
        try:
            model: ModelInfo = await replica.ask(LoadRequest(self.spec, number, self._threads, os.getpid()))
        except Exception:  # a cancellation comes from `__aexit__`, which ends all remaining ones
            await self._end(replica)
            raise
        replica.ready = True
        self._idle.append(replica)
        self.on_ready()
        self._run(self._replace_when_dead(replica))
        return model

    async def _replace_when_dead(self, replica: _Replica) -> None:
        await replica.exited()
        self._metrics.encoder_restarts.inc()
        code = await self._end(replica)
        log.error("encoder %d died (exit code %s): starting another", replica.number, code)
        pause, started = _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                await self._start(replica.number)
            except Exception as error:  # whatever it is: a replica that is not replaced is lost for good
                reason = str(error) or "it died while it loaded the model"
                log.error(
                    "encoder %d does not start: %s; next attempt in %g s", replica.number, reason, pause
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                log.info("encoder %d is back after %.1f s", replica.number, time.monotonic() - started)
                return

    async def _end(self, replica: _Replica) -> int:
        replica.kill()
        if replica in self._idle:
            self._idle.remove(replica)
        code = await replica.exited()
        self._replicas.discard(replica)
        return code


class PooledEmbedder:
    """The pool as an embedder, for `Store.check_embedder`. Not for the event loop's thread."""

    def __init__(self, pool: EncoderPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self.name, self.revision, self.dimension, self.prefixes = pool.model

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of the passages. Raises EmbedderError if the model or its process fails."""
        try:
            return asyncio.run_coroutine_threadsafe(
                self._pool.encode(texts, passages=True), self._loop
            ).result()
        except (EncoderDied, EncodeFailed) as error:
            reason = str(error) or "its process died"
            raise EmbedderError(f"embedder {self.name!r} cannot embed a passage: {reason}") from error
