"""The retrieval server over HTTP: a real process, a real Chroma collection, the packaged embedder."""

import asyncio
import inspect
import json
import re
import shlex
import shutil
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from conftest import unused_port
from faiss_parts import publish
from search_parts import (
    COLLECTION,
    PASSAGES,
    QUESTIONS,
    SPEC,
    START_S,
    NearEncoders,
    Server,
    build_collection,
    read_metric,
    serving,
)

from drzero.commands.serve_search import curl_line
from drzero.ops import connections
from drzero.ops.process.ports import address
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import retrieval_spec
from search.chroma.store import open_collection
from search.client import SearchClient
from search.embedders import Embedder
from search.errors import StoreError, StoreUnavailable
from search.server import bind, configure, listen, parser
from search.serving.app import INDEX_UNAVAILABLE, MAX_PASSAGES, MAX_PASSAGES_HELD, RetrievalApp
from search.serving.batching import BatchLimits
from search.serving.encoders import EncodeFailed, EncoderDied
from search.serving.metrics import Metrics
from search.serving.service import Retrieval, ServiceLimits
from search.stored_index import DATABASE_FILE


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    return build_collection(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def url(chroma):
    with serving(chroma, "--access-log") as server:
        yield server.url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def embedder():
    return Embedder(SPEC)


def test_an_index_is_served_with_the_prefixes_it_was_embedded_with(tmp_path):
    own = replace(SPEC, query_prefix="ask: ", passage_prefix="text: ")
    with serving(build_collection(tmp_path, own)) as server:
        answer = httpx.post(
            f"{server.url}/retrieve", json={"queries": ["chemist violet dye"]}, trust_env=False
        )
    assert answer.json()["result"][0][0]["title"] == "Nara Dunn"


# --- the wire format ---


# --- a client of Search-R1's kind, request and answer written out from its description ---

# Such a client posts the queries of a whole batch with `topk` and `return_scores`, and takes from each item
# of `result` the document's `contents`: the first line is the title, the rest the text. Its corpora are JSON
# lines of `id` and `contents`, with the title in quotes on the first line, as `build_collection` has them.


def post(http: httpx.Client, body: bytes | str) -> httpx.Response:
    """The answer to a body as it is, byte for byte."""
    return http.post("/retrieve", content=body, headers={"Content-Type": "application/json"})


def test_request_with_scores_is_answered_as_such_a_client_reads_it(http):
    queries = b'["who painted The Blue Gate?", "caf\\u00e9 by the Vell"]'
    answer = post(http, b'{"queries": %b, "topk": 2, "return_scores": true}' % queries).json()
    assert [len(hits) for hits in answer["result"]] == [2, 2]
    title, *lines = answer["result"][0][0]["document"]["contents"].split("\n")
    assert (title, lines) == ("Mara Tesk", [PASSAGES["Mara Tesk"]])


def test_answer_with_scores_written_out(http):
    response = post(http, b'{"queries": ["chemist violet dye"], "topk": 1, "return_scores": true}')
    assert response.headers["content-type"] == "application/json"
    text = PASSAGES["Nara Dunn"]
    before, score = response.text.removesuffix("}]]}").split(',"score":')
    assert before == (
        f'{{"result":[[{{"document":{{"title":"Nara Dunn","text":"{text}","contents":"Nara Dunn\\n{text}",'
        f'"id":"10"}}'
    )
    assert 0.3 < float(score) <= 1.0


def test_answer_without_scores_written_out(http):
    text = PASSAGES["Nara Dunn"]
    response = post(http, b'{"queries": ["chemist violet dye"], "topk": 1, "return_scores": false}')
    assert response.text == (
        f'{{"result":[[{{"title":"Nara Dunn","text":"{text}","contents":"Nara Dunn\\n{text}","id":"10"}}]]}}'
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"return_scores": false, "topk": 3, "queries": ["salt"]}',
        b'{"queries": ["salt"]}',
        b'{"queries": ["salt"], "topk": null}',
        b'{"queries": ["salt"], "retriever": "e5"}',
    ],
    ids=["other order", "only queries", "topk null", "a field of somebody else's"],
)
def test_order_is_free_and_all_but_the_queries_may_be_left_out(http, body):
    expected = post(http, b'{"queries": ["salt"], "topk": 3, "return_scores": false}').json()
    assert post(http, body).json() == expected
    assert len(expected["result"][0]) == 3


# --- the other endpoints ---


def test_a_passage_is_read_by_its_id(url, http):
    ((found, *_),) = http.post("/retrieve", json={"queries": list(QUESTIONS)[:1]}).json()["result"]
    assert asyncio.run(read(url, found["id"])) == found["contents"]
    assert http.get(f"/passages/{found['id']}").json() == {"id": found["id"], "text": found["contents"]}
    for other in ("unknown", "a/b ?#%", "\u00e9\U0001f30a"):
        assert asyncio.run(read(url, other)) is None


async def read(url, key):
    client = SearchClient(url)
    try:
        return await client.passage(key)
    finally:
        await client.aclose()


def test_the_docs_page_loads_nothing_from_elsewhere(http):
    page = http.get("/docs").text
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(loaded) == 3 and "http" not in page.replace("/openapi.json", "")
    for path in loaded:
        answer = http.get(path)
        assert answer.status_code == 200 and answer.content, path
        if path.endswith(".css"):
            assert not re.search(r"url\((?!data:|#|'data:|\"data:)", answer.text)


def test_the_line_that_serve_search_prints_is_answered_by_the_service(http, url):
    line = curl_line(url, 2, with_token=True)
    curl, *words = shlex.split(line)
    options = dict(zip(words[::-1][1::2], words[::-1][::2], strict=False))
    assert curl == "curl" and f"{url}/retrieve" in words and "Authorization: Bearer $RETRIEVAL_TOKEN" in words
    answer = post(http, options["-d"])
    assert answer.status_code == 200 and len(answer.json()["result"][0]) == 2


@pytest.mark.parametrize(
    ("host", "asked_at"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]")]
)
def test_the_address_that_serve_search_prints_can_be_asked_from_this_machine(host, asked_at):
    assert address(host, 8000) == f"http://{asked_at}:8000"


def test_metrics_count_requests_queries_errors_and_seconds(http, url):
    changes = {"requests_total": 3, "queries_total": 4, 'errors_total{status="422"}': 1}
    changes |= {"encode_seconds_count": 1, "index_seconds_count": 1, "batch_queries_sum": 2}
    changes |= {"cache_hits_total": 2, "cache_misses_total": 2}
    before = [read_metric(url, f"retrieval_{name}") for name in changes]
    http.post("/retrieve", json={"queries": ["not asked before", "nor this"]})
    http.post("/retrieve", json={"queries": ["nor this", "not asked before"]})
    http.post("/retrieve", json={"queries": []})
    after = [read_metric(url, f"retrieval_{name}") for name in changes]
    assert [now - then for now, then in zip(after, before, strict=True)] == list(changes.values())


# --- a published FAISS index, over the wire ---


@pytest.fixture(scope="module")
def published(tmp_path_factory, embedder):
    """The passages in the layout in which the field shares Wikipedia: index and corpus, nothing else."""
    contents = [f'"{title}"\n{text}' for title, text in PASSAGES.items()]
    return publish(
        tmp_path_factory.mktemp("faiss") / "wiki", embedder.encode_passages(contents), contents=contents
    )


def test_a_published_faiss_index_is_served_unchanged_with_the_best_answers_of_chroma(http, published):
    body = {"queries": list(QUESTIONS), "topk": 3, "return_scores": True}
    with (
        serving(published, "--embedder", SPEC.name, flag="--faiss-path") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as faiss,
    ):
        theirs = faiss.post("/retrieve", json=body).json()["result"]
        health = faiss.get("/health").json()
    assert (health["status"], health["collection"], health["documents"]) == (
        "ok",
        published.name,
        len(PASSAGES),
    )
    ours = http.post("/retrieve", json=body).json()["result"]
    # Their vectors are of texts whose title is in quotes, so the order of lesser hits may differ.
    for (best, *_), (of_chroma, *_) in zip(theirs, ours, strict=True):
        title, text = best["document"]["title"], best["document"]["text"]
        assert (title, text) == (of_chroma["document"]["title"], of_chroma["document"]["text"])
        assert best["document"]["contents"] == f'"{title}"\n{text}'


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "records no embedder: name the one that made it with --embedder"),
        (("--embedder", SPEC.name, "--faiss-corpus", "none.jsonl.gz"), "is compressed"),
    ],
)
def test_a_faiss_index_that_cannot_be_served_ends_the_start_with_one_line(published, more, message):
    code, errors = Server(published, *more, flag="--faiss-path").ended(START_S)
    assert code == 2
    assert [message in line for line in errors.splitlines() if line.startswith("error: ")] == [True]


# --- bad requests ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"queries": []}', "of length >= 1 - at `$.queries`"),
        (json.dumps({"queries": ["a"] * 4097}), "of length <= 4096 - at `$.queries`"),
        (json.dumps({"queries": ["a" * 8193]}), "of length <= 8192 - at `$.queries["),
        ('{"queries": ["a"], "topk": 0}', "`int` >= 1 - at `$.topk`"),
        ('{"queries": ["a"], "topk": 101}', "`int` <= 100 - at `$.topk`"),
        ('{"queries": "a"}', "Expected `array`, got `str` - at `$.queries`"),
        ('{"queries": ["\\ud800"]}', "invalid Unicode"),
        ('{"queries": ["a"', "the body is no JSON"),
        ('{"queries": ["a"], "other": ' + "[" * 100_000, "nested too deep"),
        ("{}", "missing required field `queries`"),
        (json.dumps({"queries": ["a"] * 4096, "topk": 11}), f"queries × topk is more than {MAX_PASSAGES}"),
    ],
)
def test_bad_request_is_refused_with_the_limit(http, body, message):
    answer = post(http, body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_body_announced_as_too_long_is_refused_before_it_is_sent(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: 8388609\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body is longer than 8388608 bytes" in answer


# --- many at once ---


def test_one_client_serves_several_event_loops(url):
    client = SearchClient(url, topk=1)

    async def ask(question: str) -> str:
        (hits,) = await client.retrieve([question])
        return hits[0]["title"]

    assert [asyncio.run(ask(question)) for question in QUESTIONS] == list(QUESTIONS.values())


# --- limits that need no server process ---

Work = Callable[[httpx.AsyncClient, Retrieval], Coroutine[Any, Any, Any]]


def in_process(chroma: Path, encoders: Any, work: Work, **more: Any) -> Any:
    """Run `work` with a client of the app over `chroma`, without sockets."""
    token, limits = more.pop("token", None), ServiceLimits(**more)

    async def whole() -> Any:
        with open_collection(chroma, COLLECTION) as store:
            retrieval = Retrieval(store, encoders, Metrics(), limits)
            transport = httpx.ASGITransport(RetrievalApp(retrieval, token))
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                answer = await work(client, retrieval)
            await retrieval.batcher.close()
            return answer

    return asyncio.run(asyncio.wait_for(whole(), 60))


def asked(chroma: Path, encoders: Any, method: str, path: str, request: Any = None, **more: Any) -> Any:
    """The app's answer to one request."""

    async def ask(client: httpx.AsyncClient, _: Retrieval) -> httpx.Response:
        return await client.request(method, path, **(request or {}))

    return in_process(chroma, encoders, ask, **more)


class BrokenEncoders:
    """Stands for encoders that fail with `error`, or never answer without one."""

    ready = 1

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.on_ready: Callable[[], None] = lambda: None

    async def encode(self, texts: Sequence[str]) -> np.ndarray:
        if self._error is None:
            await asyncio.sleep(1)
            raise EncoderDied
        raise self._error


@pytest.mark.parametrize(
    ("method", "path", "known"), [("POST", "/retrieve", 422), ("GET", "/passages/a", 404)]
)
@pytest.mark.parametrize(
    "credentials", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret"}]
)
def test_only_requests_with_the_token_are_answered(chroma, credentials, method, path, known):
    request = {"json": {"queries": []}, "headers": credentials}
    answer = asked(chroma, BrokenEncoders(), method, path, request, token="s3cret")
    assert answer.status_code == (known if "s3cret" in str(credentials) else 401)
    assert "s3cret" not in answer.text


def test_with_a_token_health_is_open_and_returns_only_ok(chroma, embedder):
    answer = asked(chroma, NearEncoders(embedder), "GET", "/health", token="s3cret", canary_s=60.0)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


class Body:
    """A body of so many MiB. httpx's transport reads the next one when the app asks."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.read < self.size:
            self.read += 1
            yield b" " * (1 << 20)


def test_a_body_without_an_announced_length_is_refused_before_it_is_read_to_the_end(chroma):
    body = Body(1000)
    answer = asked(chroma, BrokenEncoders(), "POST", "/retrieve", {"content": body})
    assert (answer.status_code, answer.json()["detail"]) == (413, "the body is longer than 8388608 bytes")
    assert body.read < 12


def while_full(chroma: Path, **request: Any) -> httpx.Response:
    """The answer to a request while two queries wait, of which two may."""

    async def ask(client: httpx.AsyncClient, retrieval: Retrieval) -> httpx.Response:
        first = asyncio.create_task(client.post("/retrieve", json={"queries": ["busy"]}))
        await asyncio.sleep(0.05)
        retrieval.batcher.submit(["a", "b"], 3)
        answer = await client.post("/retrieve", **request)
        retrieval.batcher.give_up("the test is over")
        await first
        return answer

    return in_process(chroma, BrokenEncoders(), ask, batch=BatchLimits(queue=2))


def test_a_full_queue_is_a_503_with_retry_after(chroma):
    answer = while_full(chroma, json={"queries": ["c"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "2 queries wait, at most 2 may" in answer.json()["detail"]


def test_a_long_body_is_not_read_while_the_queue_is_full(chroma):
    body = Body(8)
    answer = while_full(chroma, content=body, headers={"Content-Length": str(8 << 20)})
    assert (answer.status_code, answer.headers["connection"], body.read) == (503, "close", 0)


# --- connections that a client leaves hanging ---


def http_client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)


def on_loopback(chroma: Path, encoders: Any, work: Callable[[int], Coroutine[Any, Any, Any]]) -> Any:
    """Run `work(port)` next to uvicorn with the service's settings, until every connection is closed."""

    async def whole() -> Any:
        listener = bind("127.0.0.1", 0)
        with listener, open_collection(chroma, COLLECTION) as store:
            retrieval = Retrieval(store, encoders, Metrics(), ServiceLimits())
            server = uvicorn.Server(configure(RetrievalApp(retrieval)))
            listen(listener)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            answer = await work(listener.getsockname()[1])
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving
            await retrieval.batcher.close()
            return answer

    return asyncio.run(asyncio.wait_for(whole(), 60))


MOST = {"queries": ["a"] * 4096, "topk": 10}


def request(asked: dict[str, Any]) -> bytes:
    body = json.dumps(asked).encode()
    return b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("sent", [b"", b"POST /retr", request({})[:-4]])
@pytest.mark.parametrize("answers", [0, 1], ids=["first", "second"])
def test_a_connection_whose_head_stays_incomplete_is_closed(chroma, sent, answers, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.2)

    async def linger(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(answers):
            writer.write(request({}))
            await reader.readuntil(b"}")
        writer.write(sent or b"\r\n" * answers)
        with suppress(ConnectionResetError):
            await reader.read()  # returns when the server has closed it
        writer.close()

    on_loopback(chroma, BrokenEncoders(), linger)


def test_a_client_that_does_not_read_its_answer_is_cut_off(chroma, embedder, monkeypatch):
    monkeypatch.setattr(connections, "WRITE_S", 0.2)

    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        # Small, so that the answer of 7 MB does not fit into the buffers of both ends.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, request(MOST))
        assert await loop.sock_recv(client, 1)  # the answer has begun

    with socket.socket() as client:
        client.setblocking(False)
        # Waits until the server has closed the connection.
        on_loopback(chroma, NearEncoders(embedder), ask)


def test_an_answer_of_many_pieces_arrives_whole(chroma, embedder):
    async def ask(port: int) -> list[Any]:
        async with http_client(port) as client:
            lists: list[Any] = (await client.post("/retrieve", json=MOST)).json()["result"]
        return lists

    lists = on_loopback(chroma, NearEncoders(embedder), ask)
    assert len(lists) == 4096
    assert len(lists[0]) == 10 and all(each == lists[0] for each in lists)


def test_passages_that_nobody_reads_are_bounded_and_free_again_when_their_clients_leave(chroma, embedder):
    async def crowd(port: int) -> list[int]:
        clients = MAX_PASSAGES_HELD // MAX_PASSAGES
        unread = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
        for reader, writer in unread:
            writer.write(request(MOST))
            await reader.readuntil(b"\r\n\r\n")  # its answer has begun
        async with http_client(port) as client:
            refused = await client.post("/retrieve", json={"queries": ["a"]})
            assert f"{MAX_PASSAGES_HELD} passages are being found or sent" in refused.json()["detail"]
            assert int(refused.headers["retry-after"]) >= 1
            for _, writer in unread:
                writer.transport.abort()
            statuses = [refused.status_code]
            while statuses[-1] == 503:
                statuses.append((await client.post("/retrieve", json={"queries": ["a"]})).status_code)
        return [statuses[0], statuses[-1]]

    assert on_loopback(chroma, NearEncoders(embedder), crowd) == [503, 200]


def test_uvicorn_has_no_limits_of_its_own_for_heads_and_unread_answers():
    """As long as this holds, `drzero.ops.connections` is needed."""
    names = [name.partition("timeout_") for name in inspect.signature(uvicorn.Config).parameters]
    limits = {name for before, found, name in names if found and not before}
    assert limits == {"keep_alive", "notify", "graceful_shutdown", "worker_healthcheck"}


# --- failures while serving ---


LATE = "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("method", "path", "error", "status", "said"),
    [
        ("POST", "/retrieve", EncodeFailed("CUDA error"), 500, "retrieval failed: CUDA error"),
        ("GET", "/health", EncodeFailed("CUDA error"), 503, "CUDA error"),
        ("POST", "/retrieve", None, 503, LATE),
        ("GET", "/health", None, 503, LATE),
    ],
)
def test_an_embedder_that_fails_or_hangs_is_an_error_with_its_message(
    chroma, method, path, error, status, said
):
    request = {"json": {"queries": ["a"]}}
    answer = asked(chroma, BrokenEncoders(error), method, path, request, deadline_s=0.2)
    assert (answer.status_code, answer.json()["detail"][: len(said)]) == (status, said)


def test_health_has_a_separate_status_for_an_index_that_does_not_answer(chroma, embedder):
    async def ask(client: httpx.AsyncClient, retrieval: Retrieval) -> tuple[int, int, float]:
        def away(vectors: np.ndarray, topk: int) -> Any:
            raise StoreUnavailable("gone")

        retrieval.store.query = away  # type: ignore[method-assign]
        health = await client.get("/health")
        answer = await client.post("/retrieve", json={"queries": ["a"]})
        counted = retrieval.metrics.registry.get_sample_value("retrieval_index_seconds_count")
        return health.status_code, answer.status_code, float(counted or 0)

    # Failed batches are not counted as finished work, which a supervisor watches.
    assert in_process(chroma, NearEncoders(embedder), ask) == (INDEX_UNAVAILABLE, 503, 0.0)


def test_health_is_not_answered_from_the_cache(chroma, embedder):
    async def ask(client: httpx.AsyncClient, retrieval: Retrieval) -> list[list[str]]:
        await client.post("/retrieve", json={"queries": ["canary"], "topk": 1})
        await client.get("/health")
        return encoders.batches

    encoders = NearEncoders(embedder)
    assert in_process(chroma, encoders, ask) == [["canary"], ["canary"]]


def test_health_does_not_wait_behind_the_queue(chroma, embedder):
    async def ask(client: httpx.AsyncClient, retrieval: Retrieval) -> list[list[str]]:
        asked = asyncio.create_task(client.post("/retrieve", json={"queries": list("abcdef")}))
        await asyncio.sleep(0)
        while not encoders.batches:
            await asyncio.sleep(0.001)
        await client.get("/health")
        await asked
        return encoders.batches

    encoders = NearEncoders(embedder)
    batches = in_process(chroma, encoders, ask, batch=BatchLimits(batch=2), canary_s=60.0)
    assert batches[1][0] == "canary"


# --- starting and stopping ---


def refusal(chroma: Path, *more: str, port: int = 0) -> str:
    code, errors = Server(chroma, *more, port=port).ended(START_S)
    assert code == 2
    assert errors.count("\n") == 1, errors
    return errors


def test_a_collection_whose_texts_were_swapped_is_not_served(chroma, tmp_path):
    folder = Path(shutil.copytree(chroma, tmp_path / "chroma"))
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database, database:
        database.execute("UPDATE embedding_metadata SET string_value = 'Vell' WHERE key = 'title'")
    message = refusal(folder)
    assert f"is damaged, not as published: texts in {DATABASE_FILE}. Restore the folder" in message


@pytest.mark.parametrize(
    ("more", "port", "message"),
    [
        (("--embedder", "no/such-model"), 0, "embedder 'no/such-model' could not be loaded"),
        ((), 70000, "cannot listen on 127.0.0.1 port 70000 (bind(): port must be 0-65535.)"),
    ],
)
def test_a_bad_setting_is_reported_in_one_line(chroma, more, port, message):
    assert message in refusal(chroma, *more, port=port)


def test_of_two_servers_that_start_together_the_second_to_listen_reports_the_port_in_use():
    port = unused_port()
    with bind("127.0.0.1", port) as first, bind("127.0.0.1", port) as second:
        listen(first)
        refused = rf"cannot listen on 127\.0\.0\.1 port {port} \(Address already"
        with pytest.raises(StoreError, match=refused):
            listen(second)
        with pytest.raises(StoreError, match=refused):
            bind("127.0.0.1", port)


def test_a_refusal_has_its_traceback_at_the_debug_level(chroma, monkeypatch):
    monkeypatch.setenv("DRZERO_LOG_LEVEL", "DEBUG")
    code, errors = Server(chroma, collection="wikis").ended(START_S)
    assert code == 2 and "Traceback" in errors and errors.splitlines()[-1].startswith("error: no collection")


def test_every_setting_of_the_service_reaches_the_server():
    chosen = {"encoders": 3, "threads": 2, "max_batch": 32, "window_ms": 1.5, "max_queue": 99, "cache_mb": 7}
    overrides = [f"retrieval.{key}={value}" for key, value in chosen.items()]
    ports = ["retrieval.port=8123", "solver.port=8124", "retrieval.access_log=true"]
    config = resolve(compose_stage("serve_search", ["hardware=cpu", *overrides, *ports]))
    command = retrieval_spec(config).command
    args = vars(parser().parse_args(command[command.index("search.server") + 1 :]))
    assert {key: args[key] for key in chosen} == chosen
    assert args["access_log"] and args["port"] == 8123
