"""Encoder processes on uvloop: hung ones are replaced, restarts outlast faults, none is left."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import psutil
import pytest
import uvloop
from search_parts import lives

from search.embedders import Embedder, EmbedderSpec
from search.serving import encoders
from search.serving.encoders import EncoderDied, EncoderPool
from search.serving.metrics import Metrics

LIMIT_S = 240.0
"""Longer than an encoder takes to load on a busy machine."""


def with_pool(tiny: EmbedderSpec, work: Callable[[EncoderPool], Awaitable[None]]) -> None:
    """Run `work` with one replica, which must not outlive it."""

    async def whole() -> None:
        async with asyncio.timeout(LIMIT_S), EncoderPool(tiny, 1, 1, Metrics()) as pool:
            await work(pool)

    uvloop.run(whole())
    assert replicas() == []


def replicas() -> list[psutil.Process]:
    """The encoder processes of this one, while they load and afterwards."""
    found = [(child, " ".join(child.cmdline())) for child in psutil.Process().children() if lives(child)]
    return [child for child, words in found if "encoder_worker" in words or "retrieval encoder" in words]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@pytest.mark.slow("waits for two encoders; test_search_faults.py kills them on the shared server")
def test_an_encoder_that_hangs_is_killed_and_replaced(tiny, monkeypatch):
    async def work(pool: EncoderPool) -> None:
        (hanging,) = replicas()
        hanging.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(encoders, "HUNG_S", 0.2)
        with pytest.raises(EncoderDied):
            await pool.encode(["salt"])
        monkeypatch.undo()
        assert not pool.ready
        await until(lambda: pool.ready)
        assert not lives(hanging)
        np.testing.assert_allclose(
            await pool.encode(["salt"]), Embedder(tiny).encode_queries(["salt"]), atol=1e-5
        )

    with_pool(tiny, work)


def take_handles() -> list[int]:
    """Open files until no more can be opened."""
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


@contextlib.contextmanager
def files_to_open(free: int) -> Iterator[None]:
    """Let this process open so many more files or sockets. At the end no fewer must be free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    taken = take_handles()
    for _ in range(free):
        os.close(taken.pop())
    try:
        yield
        still_free = take_handles()
        taken += still_free
        assert len(still_free) >= free
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow("a second set of encoder processes; the restart itself is tested above")
@pytest.mark.parametrize("free", [0, 2])
def test_lack_of_file_handles_delays_a_restart_and_does_not_stop_it(tiny, caplog, free):
    async def work(pool: EncoderPool) -> None:
        (victim,) = replicas()
        with files_to_open(free):
            os.kill(victim.pid, signal.SIGKILL)  # psutil would open files for it
            await until(lambda: "does not start: [Errno 24] Too many open files" in caplog.text)
        await until(lambda: pool.ready)

    with_pool(tiny, work)


@pytest.mark.parametrize("wait_for", [replicas, lambda: True], ids=["one runs", "at once"])
def test_a_start_that_is_cancelled_halfway_leaves_no_process(tiny, wait_for):
    async def start_and_cancel() -> None:
        starting = asyncio.create_task(EncoderPool(tiny, 2, 1, Metrics()).__aenter__())
        await asyncio.sleep(0)
        await until(wait_for)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    uvloop.run(asyncio.wait_for(start_and_cancel(), LIMIT_S))
    assert replicas() == []
