"""Our store and server over a real Chroma server that stops, restarts, hangs or holds other collections."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import chromadb.config
import httpx
import numpy as np
import pytest
from chroma_parts import NAME, ChromaServer, build, chroma_server, collection_info, text_of
from conftest import unused_port
from search_parts import wait_for

import search.chroma.location
from drzero.recipe.fingerprint import fingerprint_collection
from search.chroma.location import ChromaPlace, Quota, connect, request_headers
from search.chroma.sharded_store import chroma_index
from search.chroma.store import Store, collection_names, iter_documents, open_collection
from search.errors import StoreError, StoreUnavailable
from search.server import wait_for_store

COUNT = 20
LIMIT_S = 60.0
"""A limit for steps that take a second."""


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    with chroma_server(tmp_path_factory.mktemp("remote") / "chroma", unused_port()) as server:
        yield server


@pytest.fixture
def vectors(chroma):
    """The vectors of the collection, which is built again."""
    empty(chroma)
    return build(chroma.url, count=COUNT)


def empty(chroma: ChromaServer) -> None:
    with connect(chroma.url, create=True) as client:
        if NAME in collection_names(client):
            client.delete_collection(NAME)


def change(chroma: ChromaServer) -> None:
    with connect(chroma.url, create=True) as client:
        handle = client.get_collection(NAME, embedding_function=None)
        handle.modify(metadata=collection_info("version-2", COUNT).to_metadata())


@pytest.fixture
def store(chroma, vectors):
    with open_collection(chroma.url, NAME) as opened:
        yield opened


def answers_right(store: Store, vectors: np.ndarray) -> bool:
    found = store.query(vectors, 3)
    return [hits[0]["document"]["text"] for hits in found] == [text_of(number) for number in range(COUNT)]


def refusal(place: str, name: str = NAME) -> str:
    with pytest.raises(StoreError) as caught:
        open_collection(place, name)
    return str(caught.value)


def test_collection_on_a_server_is_like_one_in_a_folder(chroma, store, vectors, tmp_path):
    build(tmp_path / "chroma", count=COUNT)
    there, here = (
        fingerprint_collection(chroma_index([it], NAME)) for it in (chroma.url, tmp_path / "chroma")
    )
    assert there == here
    with open_collection(tmp_path / "chroma", NAME) as local:
        here, there = local.query(vectors, COUNT + 1), store.query(vectors, COUNT + 1)
        assert store.info == local.info
    assert [[hit["document"] for hit in hits] for hits in here] == [
        [hit["document"] for hit in hits] for hits in there
    ]


def test_documents_of_a_server_are_read_in_pages_and_sorted_by_id(chroma, vectors):
    read = list(iter_documents(ChromaPlace.parse(chroma.url).within(Quota(page=7)), NAME))
    numbers = sorted(range(COUNT), key=str)
    assert read == [(str(number), f"title {number}", text_of(number)) for number in numbers]


def test_query_fails_while_the_server_is_down_and_works_again_when_it_is_back(chroma, store, vectors):
    assert answers_right(store, vectors)
    chroma.stop()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"{chroma.url}"):
            store.query(vectors, 3)
    chroma.start()
    assert answers_right(store, vectors)


def test_hanging_server_is_given_up_in_time(chroma, vectors, monkeypatch):
    monkeypatch.setattr(search.chroma.location, "_READ_TIMEOUT_S", 3)
    with open_collection(chroma.url, NAME) as store:
        assert answers_right(store, vectors)
        chroma.signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match="Timeout"):
                store.query(vectors, 3)
            with pytest.raises(StoreUnavailable, match=r"no Chroma server answers .*Timeout"):
                store.query(vectors, 3)
        finally:
            chroma.signal(signal.SIGCONT)
        assert answers_right(store, vectors)


def test_chroma_still_has_no_setting_for_a_timeout():
    # When it has one, `_server_client` need not reach into the client.
    names = [name for name in chromadb.config.Settings.model_fields if "timeout" in name]
    assert names == [
        "chroma_logservice_request_timeout_seconds",
        "chroma_sysdb_request_timeout_seconds",
        "chroma_query_request_timeout_seconds",  # of the distributed server, not of its client
    ]


def test_collection_is_served_while_its_version_is_the_same(chroma, store, vectors):
    empty(chroma)
    with pytest.raises(StoreUnavailable, match=f"no collection '{NAME}'"):
        store.query(vectors, 3)
    build(chroma.url, seed=1, count=COUNT)
    for _ in range(2):
        with pytest.raises(
            StoreUnavailable, match=r"another version now \(version-1, and version-0 is served"
        ):
            store.query(vectors, 3)
    empty(chroma)
    build(chroma.url, count=COUNT)
    assert answers_right(store, vectors)
    change(chroma)
    with pytest.raises(StoreUnavailable, match=r"another version now \(version-2"):
        store.query(vectors, 3)


def test_start_waits_for_a_server_that_starts_later(chroma, vectors, caplog):
    chroma.stop()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(wait_for_store, chroma_index([chroma.url], NAME))
        wait_for(lambda: "waiting for the index" in caplog.text, LIMIT_S, or_else=opening.done)
        chroma.start()
        with closing(opening.result()) as store:
            assert answers_right(store, vectors)


def test_server_that_stays_down_is_one_clear_error_after_the_wait():
    address = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(StoreError) as caught:
        wait_for_store(chroma_index([address], NAME), wait_s=0)
    message = str(caught.value)
    assert message.startswith(f"no Chroma server answers at {address} (ConnectError: ")
    assert "start one" in message and "\n" not in message


def test_server_of_another_kind_is_recognised(start_peer):
    peer = start_peer("/retrieve", lambda _: {})
    assert "is no Chroma server, or not one of version 1: it answered HTTP 404" in refusal(peer.url)


def test_missing_database_is_named(chroma):
    assert "has no database 'papers' of a tenant 'me'" in refusal(f"{chroma.url}/me/papers")


def test_missing_collection_is_named_with_the_existing_ones(chroma, vectors):
    assert refusal(chroma.url, "wikis") == f"no collection 'wikis' in {chroma.url}: it holds {NAME}"


def test_api_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("CHROMA_API_KEY", " ck-secret\n")
    with Relay("").running() as guard:
        guard.before = lambda path: 403
        message = refusal(guard.url)
    assert guard.keys == ["ck-secret"]
    assert "refuses access (HTTP 403): check its API key" in message
    shown = f"{message} {caplog.text} {ChromaPlace.parse('https://h/a/b')!r}"
    assert "secret" not in shown


def test_api_key_that_cannot_be_sent_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("CHROMA_API_KEY", "ck\nsecret")
    said = refusal("https://127.0.0.1:9")
    assert said == "CHROMA_API_KEY holds characters that an HTTP header cannot carry"


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("https://api.trychroma.com/a/b", True),
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://10.0.0.7:1", False),
        ("http://chroma.example:1", False),
    ],
)
def test_api_key_goes_where_nobody_can_read_it_on_the_way(monkeypatch, address, sent):
    monkeypatch.setenv("CHROMA_API_KEY", "ck-secret")
    headers = request_headers(ChromaPlace.parse(address))
    assert headers == ({"X-Chroma-Token": "ck-secret"} if sent else {})


def test_proxy_of_the_environment_is_not_used_for_a_chroma_within_this_machine(chroma, vectors, monkeypatch):
    monkeypatch.setenv("CHROMA_API_KEY", "ck-secret")
    with Relay(chroma.url).running() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("no_proxy", "intranet.example")
        with open_collection(chroma.url, NAME) as store:
            assert answers_right(store, vectors)
        assert proxy.asked == []
        assert os.environ["no_proxy"] == "intranet.example,127.0.0.1,localhost,::1"


class Relay(ThreadingHTTPServer):
    """Passes requests on to a Chroma server, and keeps their paths in `asked`, their API keys in `keys`.

    `before` is called with each path first. If it returns a number, that is the answer's status, and the
    answer repeats the key.
    """

    daemon_threads = True

    def __init__(self, goal: str) -> None:
        super().__init__(("127.0.0.1", 0), RelayHandler)
        self.goal, self.url = goal, f"http://127.0.0.1:{self.server_port}"
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.before: Callable[[str], int | None] = lambda path: None

    @contextmanager
    def running(self) -> Iterator["Relay"]:
        thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class RelayHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Relay)
        key = self.headers.get("X-Chroma-Token")
        self.server.asked.append(self.path)
        self.server.keys.append(key)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.server.before(self.path), f'{{"error": "bad key {key}"}}'.encode()
        if status is None:
            headers = {"Content-Type": "application/json"}
            url = self.server.goal + self.path
            with httpx.Client(trust_env=False) as client:
                found = client.request(self.command, url, content=body, headers=headers)
            status, answer = found.status_code, found.content
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def relay(chroma, vectors):
    with Relay(chroma.url).running() as relay:
        yield relay


def test_answer_of_a_collection_that_changes_during_the_query_is_discarded(chroma, vectors, relay):
    changed = threading.Event()

    def change_once(path: str) -> None:
        if path.endswith("/query") and not changed.is_set():
            changed.wait(1)  # a check next to the query would be finished by then
            change(chroma)
            changed.set()

    relay.before = change_once
    with (
        open_collection(relay.url, NAME) as store,
        pytest.raises(StoreUnavailable, match=r"another version now \(version-2, and version-0"),
    ):
        store.query(vectors, 3)


def test_index_that_limits_the_rate_is_unavailable_and_not_connected_to_again(relay, vectors):
    with open_collection(relay.url, NAME) as store:
        assert answers_right(store, vectors)
        relay.before = lambda path: 429 if path.endswith("/query") else None
        relay.asked.clear()
        with pytest.raises(StoreUnavailable):
            store.query(vectors, 3)
        relay.before = lambda path: None
        assert answers_right(store, vectors)
    assert [path.rpartition("/")[2].partition("?")[0] for path in relay.asked] == ["query", "query", NAME]
