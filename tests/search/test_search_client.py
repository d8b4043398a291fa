"""The client's deadline, retries, refusals and token, against a scripted server on loopback."""

import asyncio
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
from conftest import unused_port
from scripted_search import ANSWER, retrieve, serving

from drzero.ops.bearer import TokenUnusable
from search.client import CONNECTIONS, SearchClient, SearchRefused, SearchRequestError, SearchUnavailable
from search.wire import TOKEN_VARIABLE


def test_request_is_of_the_wire_format():
    with serving((200, ANSWER)) as server:
        assert retrieve(f"{server.url}/", ["salt"], topk=5) == ANSWER["result"]
    assert server.requests[0][1] == {"queries": ["salt"], "topk": 5, "return_scores": False}


@pytest.mark.parametrize(("token", "sent"), [("abc", "Bearer abc"), (" abc\n", "Bearer abc"), ("", None)])
def test_token_of_the_environment_is_sent_as_bearer(monkeypatch, token, sent):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with serving((200, ANSWER)) as server:
        retrieve(server.url, ["salt"])
    assert server.requests[0][0].get("Authorization") == sent


@pytest.mark.parametrize("token", ["ab\ncd", "schlüssel"])
def test_token_that_cannot_be_sent_is_refused_without_being_shown(monkeypatch, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(TokenUnusable, match="RETRIEVAL_TOKEN holds characters") as caught:
        SearchClient("http://127.0.0.1:9")
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("failures", "options", "retry_after"),
    [
        ([(503, {"detail": "loading"}), (500, "oops")], {}, ""),
        ([(503, {"detail": "busy"})], {"deadline_s": 3.0}, "600"),
        ([(0, None)], {"deadline_s": 4.5}, ""),
    ],
    ids=["failures", "a wait longer than the deadline, cut for one last attempt", "a hanging connection"],
)
def test_server_failures_are_retried_until_an_answer(failures, options, retry_after):
    with serving(*failures, (200, ANSWER), retry_after=retry_after) as server:
        assert retrieve(server.url, ["salt"], **options) == ANSWER["result"]
    assert len(server.requests) == len(failures) + 1


@pytest.mark.parametrize("status", [503, 429])
def test_busy_server_is_retried_after_the_requested_wait_and_not_by_all_at_once(status):
    with serving(*[(status, {"detail": "busy"})] * 6, (200, ANSWER), retry_after="1") as server:

        async def ask() -> None:
            client = SearchClient(server.url)
            await asyncio.gather(*(client.retrieve(["salt"]) for _ in range(6)))
            await client.aclose()

        asyncio.run(ask())
    assert len(server.requests) == 12
    waits = [again - first for first, again in zip(server.times[:6], server.times[6:], strict=True)]
    assert min(waits) >= 0.9
    assert max(waits) - min(waits) > 0.05


@pytest.mark.parametrize("retry_after", ["Wed, 21 Oct 2026 07:28:00 GMT", "soon", "-1", "1e9", "²"])
def test_retry_after_that_is_no_number_of_seconds_is_ignored(retry_after):
    with serving((503, {}), (200, ANSWER), retry_after=retry_after) as server:
        assert retrieve(server.url, ["salt"]) == ANSWER["result"]


def test_calls_of_all_solver_attempts_are_in_flight_at_once():
    together = threading.Barrier(CONNECTIONS + 1, timeout=60)
    with serving((200, ANSWER)) as server:
        server.together = together

        async def ask() -> None:
            client = SearchClient(server.url, deadline_s=60)
            asking = [asyncio.create_task(client.retrieve(["salt"])) for _ in range(CONNECTIONS)]
            await asyncio.to_thread(together.wait)  # which none would pass before all have come
            await asyncio.gather(*asking)
            await client.aclose()

        asyncio.run(ask())
    assert len(server.requests) == CONNECTIONS


def test_client_waits_for_a_server_that_starts_later():
    port = unused_port()

    async def ask() -> Any:
        client = SearchClient(f"http://127.0.0.1:{port}", deadline_s=60)
        asking = asyncio.create_task(client.retrieve(["salt"]))
        await asyncio.sleep(0.5)
        assert not asking.done()
        with serving((200, ANSWER), port=port):
            result = await asking
            await client.aclose()
        return result

    assert asyncio.run(ask()) == ANSWER["result"]


def test_deadline_ends_retries_with_url_attempts_and_last_error():
    with serving((503, {"detail": "index is loading"})) as server, pytest.raises(SearchUnavailable) as caught:
        retrieve(server.url, ["salt"], deadline_s=2.0)
    message = str(caught.value)
    assert re.match(rf"{server.url}/retrieve did not answer: [1-9]\d* attempts in ", message)
    # The deadline may end the last attempt before its answer, on a busy machine.
    assert re.search(
        r"\(deadline 2 s\), last: (ServerFailure: HTTP 503: index is loading|ReadTimeout)", message
    )


def test_query_that_the_server_fails_on_each_time_is_given_up_before_the_deadline():
    with (
        serving((500, {"detail": "retrieval failed: RuntimeError"})) as server,
        pytest.raises(SearchUnavailable, match=r"3 attempts .* HTTP 500: retrieval failed: RuntimeError"),
    ):
        retrieve(server.url, ["salt"], deadline_s=600.0)
    assert len(server.requests) == 3


def test_failures_of_other_kinds_between_equal_ones_are_retried():
    one, two, busy = (500, {"detail": "one"}), (500, {"detail": "two"}), (503, {"detail": "one"})
    with serving(one, one, two, one, busy, one, one, (200, ANSWER)) as server:
        assert retrieve(server.url, ["salt"], deadline_s=60.0) == ANSWER["result"]


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (413, "the body is longer than 8388608 bytes", SearchRefused),
        (422, "Expected `str` of length <= 8192 - at `$.queries[...]`", SearchRefused),
        (422, "Expected `int` <= 100 - at `$.topk`", SearchRequestError),
        (401, "a bearer token is needed", SearchRequestError),
        (404, "Not Found", SearchRequestError),
    ],
)
def test_refusal_of_the_queries_differs_from_a_wrong_configuration(status, detail, kind):
    with (
        serving((status, {"detail": detail})) as server,
        pytest.raises(SearchRequestError, match=f"HTTP {status}") as caught,
    ):
        retrieve(server.url, ["salt"])
    assert type(caught.value) is kind
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>", "no retrieval service"),
        ({"detail": 1}, "no retrieval service"),
        ([], "no retrieval service"),
        ({"result": None}, "no retrieval service"),
        ({"result": []}, "answered 0 of 1 queries"),
    ],
)
def test_answer_of_another_service_is_refused(body, message):
    with serving((200, body)) as server, pytest.raises(SearchRequestError, match=message):
        retrieve(server.url, ["salt"])


def test_half_of_a_surrogate_pair_in_an_answer_becomes_a_question_mark():
    with serving((200, {"result": [[{"title": "\ud83d", "text": "\ud83d\ude00 and \ude00"}]]})) as server:
        assert retrieve(server.url, ["salt"]) == [[{"title": "?", "text": "\U0001f600 and ?"}]]


def test_query_that_is_not_unicode_is_the_callers_error():
    with serving((200, ANSWER)) as server, pytest.raises(SearchRequestError, match="not valid Unicode"):
        retrieve(server.url, ["\ud800"])


def test_a_passage_that_no_server_gives_is_unavailable_at_once():
    with serving((500, "no GET here")) as server, pytest.raises(SearchUnavailable, match="HTTP 501"):
        asyncio.run(SearchClient(server.url).passage("a"))
    with pytest.raises(SearchUnavailable, match="ConnectError"):
        asyncio.run(SearchClient(server.url).passage("a"))


def test_no_queries_need_no_server():
    assert retrieve("http://127.0.0.1:9", []) == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("search.client", ["chromadb", "fastapi", "torch", "numpy"]),
        ("search.server", ["torch"]),
        ("search.index", ["ray"]),
    ],
)
def test_what_many_processes_import_leaves_heavy_packages_alone(module, heavy):
    check = f"import {module}, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", check], text=True).strip() == "[]"
