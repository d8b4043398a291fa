"""Who may ask the service, where its passages can be read, and how it is doing."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from agent_service import HOSTILE, agent_service, passages, script

from drzero.agent.answer import Source
from drzero.agent.server.chat import BODY_BYTES
from drzero.agent.server.sources import Sources
from drzero.ops import openai_http

TOKEN = "planted-0123456789"
ASKED = {"messages": [{"role": "user", "content": "Who is hostile?"}]}
LET_IN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def peers(start_peer):
    stored = {"/passages/a/b ?": {"id": "a/b ?", "text": "Kept\nin the index"}}
    return start_peer("/v1/chat/completions", script), start_peer("/retrieve", passages, stored)


@pytest.fixture
def open_service(peers):
    with agent_service(*(peer.url for peer in peers)) as service:
        yield service


@pytest.fixture
def closed_service(peers):
    with agent_service(*(peer.url for peer in peers), token=TOKEN) as service:
        yield service


@pytest.mark.parametrize("sent", [{}, {"Authorization": TOKEN}, {"Authorization": "Bearer \u00e9".encode()}])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/sources/velmar", "/nowhere", "/v1/chat/completions", "/ask", "/mcp"]
)
def test_without_the_token_nothing_is_answered(closed_service, peers, path, sent):
    answered = httpx.post(f"{closed_service.url}{path}", json=ASKED, headers=sent)
    assert answered.status_code == 401 and answered.headers["www-authenticate"] == "Bearer"
    assert answered.json()["error"]["code"] == "invalid_api_key"
    assert not peers[0].requests and TOKEN not in answered.text


def test_a_wrong_token_is_refused_before_the_body_is_read(closed_service):
    place = urlsplit(closed_service.url)
    with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_with_the_token_all_is_answered_and_page_and_health_without(closed_service):
    assert httpx.get(closed_service.url).status_code == 200
    assert httpx.get(f"{closed_service.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{closed_service.url}/v1/models", headers=LET_IN).json()["data"][0]["id"] == "side-0"
    asked = httpx.post(f"{closed_service.url}/ask", json={"question": "Who is hostile?"}, headers=LET_IN)
    assert json.loads(asked.text.split("data: ")[-1])["answer"]["sources"][0]["title"] == f"Title {HOSTILE}"
    figures = httpx.get(f"{closed_service.url}/metrics", headers=LET_IN).text
    assert 'agent_answers_total{state="failed"}' not in figures and "agent_running 0.0" in figures


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ({"solver": "healthy", "retrieval": "busy"}, 200),
        ({"solver": "healthy", "retrieval": "away"}, 503),
        ({"solver": "dead"}, 503),
        ({"solver": "failing"}, 503),
    ],
)
def test_it_is_healthy_only_with_its_services(peers, states, status):
    with agent_service(*(peer.url for peer in peers), **states) as service:
        answered = httpx.get(f"{service.url}/health")
    assert answered.status_code == status and states.items() <= answered.json().items()


def test_a_body_that_does_not_arrive_is_not_waited_for(open_service, monkeypatch):
    monkeypatch.setattr(openai_http, "BODY_S", 0.3)
    place = urlsplit(open_service.url)
    with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def cited(service, **headers):
    answered = httpx.post(f"{service.url}/v1/chat/completions", json=ASKED, headers=headers, timeout=30)
    return answered.json()["choices"][0]["message"]["annotations"][0]["url_citation"]["url"]


def test_a_passage_is_shown_as_text_and_nothing_of_it_runs(open_service):
    shown = httpx.get(cited(open_service))
    assert shown.status_code == 200 and "default-src 'none'" in shown.headers["content-security-policy"]
    assert "<script>" not in shown.text and "&lt;script&gt;" in shown.text
    assert f"Title {HOSTILE.partition('<')[0]}" in shown.text


def test_a_link_from_an_answer_opens_without_the_token_and_no_other_does(closed_service):
    link = cited(closed_service, **LET_IN)
    assert httpx.get(link).status_code == 200
    for other in (link[:-1], link.replace("hostile", "velmar"), link.partition("?")[0]):
        assert httpx.get(other).status_code == 401
    assert TOKEN not in link


def test_a_signed_link_opens_whatever_its_id(closed_service):
    link = Sources(None, TOKEN).address(f"{closed_service.url}/", Source("a/b ?", "", "", ""))
    assert httpx.get(link).status_code == 200


def test_passages_without_an_id_have_an_address_each():
    sources = Sources(None, None)
    links = {sources.address("/", Source("", "Velmar", text, "")) for text in ("It rains.", "It snows.")}
    assert len(links) == 2 and "/sources/" not in links


@pytest.mark.parametrize(("key", "status"), [("a%2Fb%20%3F", 200), ("unknown", 404), ("..%2Fhealth", 404)])
def test_a_passage_that_no_answer_showed_comes_from_the_index(open_service, key, status):
    shown = httpx.get(f"{open_service.url}/sources/{key}")
    assert shown.status_code == status
    assert status != 200 or "Kept\nin the index" in shown.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200),
        ({"Host": "[::1]:8090", "Origin": "http://[::1]:8090"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_page_of_another_site_is_not_answered(open_service, headers, status):
    port = urlsplit(open_service.url).port
    sent = {name: value.format(port=port) for name, value in headers.items()}
    assert httpx.get(f"{open_service.url}/v1/models", headers=sent).status_code == status


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/v1/chat/completions", b"", 405),
        ("GET", "/v1/embeddings", b"", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b'{"messages": 3}', 400),
        ("POST", "/v1/chat/completions", b'{"messages": ' + b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("POST", "/v1/chat/completions", b" " * (BODY_BYTES + 1), 413),
    ],
)
def test_a_bad_request_gets_openais_error(open_service, method, path, content, status):
    answered = httpx.request(method, f"{open_service.url}{path}", content=content)
    assert answered.status_code == status and answered.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_a_length_is_bounded_too(open_service):
    pieces = (b" " * (1 << 16) for _ in range((BODY_BYTES >> 16) + 2))
    answered = httpx.post(f"{open_service.url}/v1/chat/completions", content=pieces, timeout=30)
    assert answered.status_code == 413
