"""Faults on real processes: no wrong answer, no hang, and the same server is back when the fault is over.

Every client checks that its answer belongs to its question. The cache is off: every question is worked on.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import httpx
import psutil
import pytest
from search_parts import QUESTIONS, START_S, Server, build_collection, lives, read_metric, serving, wait_for

from search.stored_index import DATABASE_FILE

CLIENTS = 8
# Longer than an encoder takes to load on a busy machine.
LIMIT_S = 240.0
SUPERVISORS_PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    return build_collection(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(chroma):
    with serving(chroma, "--cache-mb", "0", "--max-batch", "8") as server:
        yield server


class Load:
    """Clients that ask question after question. `seen` counts answers by status, 0 for none at all."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[int] = Counter()
        self.sent: list[tuple[float, int]] = []  # when a request was sent, and its status
        self._url = url
        self._over = False

    async def client(self, number: int) -> None:
        questions = list(QUESTIONS.items())
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=45) as http:
            while not self._over:
                question, title = questions[number % len(questions)]
                number += 1
                status = await self._ask(http, question, title)
                if status != 200:
                    await asyncio.sleep(0.1)

    async def _ask(self, http: httpx.AsyncClient, question: str, title: str) -> int:
        sent = time.monotonic()
        try:
            answer = await http.post("/retrieve", json={"queries": [question], "topk": 1})
            status = answer.status_code
        except httpx.TimeoutException:
            raise AssertionError("a request hangs") from None
        except httpx.TransportError:
            status = 0
        if status == 200:
            assert answer.json()["result"][0][0]["title"] == title
        elif status == 503:
            assert int(answer.headers["retry-after"]) >= 1
        self.seen[status] += 1
        self.sent.append((sent, status))
        return status

    async def more(self, status: int, count: int = 20) -> None:
        """Wait for so many more answers with this status."""
        wanted = self.seen[status] + count
        await self.until(lambda: self.seen[status] >= wanted)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition. Fails past the limit, or when a client has failed."""
        ends = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < ends, f"not so within {LIMIT_S:g} s: {self.seen}"
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        self.tasks = [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
        try:
            yield self
        finally:
            self._over = True
            await asyncio.gather(*self.tasks)


def under_load(url: str, work: Callable[[Load], Awaitable[None]]) -> Load:
    """Run `work` while clients ask, and return their load."""

    async def whole() -> Load:
        async with Load(url).running() as load:
            await load.more(200)
            await work(load)
        return load

    return asyncio.run(whole())


def test_a_killed_encoder_is_replaced_and_its_batch_is_not_lost(server):
    (victim,) = server.encoders()
    deaths = read_metric(server.url, "retrieval_encoder_restarts_total")

    async def kill(load: Load) -> None:
        victim.kill()
        await load.until(lambda: victim.pid not in [encoder.pid for encoder in server.encoders()])
        await load.more(200)

    load = under_load(server.url, kill)
    # 503: on a machine where an encoder loads for longer than the deadline
    assert set(load.seen) <= {200, 503}
    assert read_metric(server.url, "retrieval_encoder_restarts_total") == deaths + 1


@pytest.mark.slow("another start of an encoder; the first tier kills one at work")
def test_an_encoder_killed_while_idle_is_replaced_before_anyone_asks(server):
    (victim,) = server.encoders()
    deaths = read_metric(server.url, "retrieval_encoder_restarts_total")
    victim.kill()
    wait_for(lambda: read_metric(server.url, "retrieval_encoder_restarts_total") == deaths + 1, 30)
    wait_for(lambda: read_metric(server.url, "retrieval_encoders_ready") == 1, LIMIT_S)
    assert [encoder.pid for encoder in server.encoders()] != [victim.pid]
    assert server.is_healthy()


def test_a_broken_folder_is_a_503_until_it_is_restored(server, chroma):
    """`test_store.py` breaks it in other ways."""
    database, whole = chroma / DATABASE_FILE, chroma.with_name("whole")

    async def break_it(load: Load) -> None:
        shutil.copy(database, whole)
        os.truncate(database, database.stat().st_size // 2)
        await load.more(503)
        assert not await asyncio.to_thread(server.is_healthy)
        shutil.copy(whole, database)
        await load.more(200)

    load = under_load(server.url, break_it)
    assert set(load.seen) == {200, 503}
    assert server.is_healthy()


def test_queries_of_a_client_that_leaves_are_not_worked_on(server):
    queries = [f"question {number} of a client that will not wait for the answer" for number in range(4000)]
    body = json.dumps({"queries": queries}).encode()
    gone = read_metric(server.url, "retrieval_gone_total")
    worked_on = read_metric(server.url, "retrieval_batch_queries_sum")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: read_metric(server.url, "retrieval_queue_depth") > 0, 30)
    wait_for(lambda: read_metric(server.url, "retrieval_gone_total") == gone + 1, 30)
    assert read_metric(server.url, "retrieval_queue_depth") == 0
    assert read_metric(server.url, "retrieval_batch_queries_sum") - worked_on < len(queries)
    assert server.is_healthy()


@pytest.fixture
def own_server(chroma):
    """One that a test may end."""
    with serving(chroma, "--cache-mb", "0") as server:
        yield server


@pytest.mark.slow("a server of its own under load; test_server.py stops one in order")
def test_sigterm_under_load_answers_the_requests_before_it(own_server):
    server = own_server
    (encoder,), terminated = server.encoders(), 0.0
    before = read_metric(server.url, "retrieval_queries_total")

    async def terminate(load: Load) -> None:
        nonlocal terminated
        encoder.send_signal(signal.SIGSTOP)
        try:
            await load.until(lambda: waiting(load) == CLIENTS)
            terminated = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
        finally:
            with suppress(psutil.NoSuchProcess):  # then the answers below show why
                encoder.send_signal(signal.SIGCONT)
        await load.until(lambda: server.process.poll() is not None)

    def waiting(load: Load) -> float:
        return read_metric(server.url, "retrieval_queries_total") - before - load.seen[200]

    load = under_load(server.url, terminate)
    assert server.process.returncode == 0
    assert {status for sent, status in load.sent if sent < terminated} == {200}
    assert any(sent > terminated for sent, _ in load.sent)
    assert set(load.seen) <= {200, 503, 0}
    assert not encoder.is_running()
    assert "Finished server process" in server.errors and "Traceback" not in server.errors
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


@pytest.mark.slow("a server of its own; test_encoders.py has the hang")
def test_sigterm_stops_a_server_whose_encoder_hangs_in_time_and_answers_open_requests(own_server):
    (encoder,) = own_server.encoders()
    encoder.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        asked = [pool.submit(ask, own_server.url, question) for question in QUESTIONS]
        wait_for(lambda: read_metric(own_server.url, "retrieval_queries_total") == len(asked), 30)
        own_server.process.terminate()
        code, _ = own_server.ended(SUPERVISORS_PATIENCE_S)
    assert (code, {status.result() for status in asked}) == (0, {503})
    assert not lives(encoder)


def test_sigterm_stops_a_server_that_waits_for_its_index(tmp_path):
    server = Server(tmp_path / "none")
    wait_for(lambda: "waiting for the index" in server.errors, START_S, or_else=server.is_over)
    assert server.end()[0] == 0


@pytest.mark.slow("starts a server a signal; killed encoders and shutdown are tested on the shared server")
def test_no_encoder_outlives_a_killed_server(own_server):
    (encoder,) = own_server.encoders()
    own_server.process.kill()
    own_server.process.wait()
    wait_for(lambda: not lives(encoder), 10)


def ask(url: str, question: str) -> int:
    body = {"queries": [question]}
    return httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=60).status_code
