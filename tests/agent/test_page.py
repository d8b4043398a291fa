"""The page's events and its own file, over the service with a scripted model and search."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

import httpx
import pytest
from agent_service import ANSWERS, SENTENCE, UNSEARCHED, agent_service, passages, script
from scripted_search import serving
from search_parts import wait_for

QUESTION = "Where does Velmar lie?"


@pytest.fixture
def peers(start_peer):
    model = start_peer("/v1/chat/completions", script)
    return model.url, start_peer("/retrieve", passages).url, model.requests


@pytest.fixture
def service(peers):
    with agent_service(*peers[:2], sides=2, places=1) as running:
        yield running


def asked(service, question=QUESTION, **more):
    answered = httpx.post(f"{service.url}/ask", json={"question": question, **more}, timeout=30)
    assert answered.status_code == 200 and answered.headers["content-type"].startswith("text/event-stream")
    return events(answered.text)


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_the_search_comes_first_then_what_it_found_then_the_answer(service):
    searching, found, answered = asked(service)
    assert searching == {"side": 0, "model": "side-0", "searching": [QUESTION]}
    assert found["searching"] == [QUESTION] and [one["id"] for one in found["found"]] == ["velmar", "hostile"]
    assert (answered["answer"]["answer"], answered["answer"]["state"]) == (ANSWERS[QUESTION], "supported")
    assert answered["answer"]["sources"][0]["evidence"] == SENTENCE
    assert answered["index"] == service.desk.index


@pytest.mark.parametrize(
    ("question", "answer", "state", "count"),
    [
        ("Who founded Velmar?", "Nobody", "unsupported", 3),
        ("Who knows?", None, "none", 3),
        (UNSEARCHED, "Nobody", "unsupported", 1),
        ("Who is hostile?", ANSWERS["Who is hostile?"], "supported", 3),
    ],
)
def test_an_answer_comes_as_what_it_is(service, question, answer, state, count):
    told = asked(service, question)
    assert len(told) == count
    assert (told[-1]["answer"]["answer"], told[-1]["answer"]["state"]) == (answer, state)


def test_the_second_side_is_asked_if_wanted_and_needs_no_second_place(service):
    told = asked(service, compare=True)
    assert [event["side"] for event in told] == [0, 0, 0, 1, 1, 1]
    assert [event["model"] for event in told if "answer" in event] == ["side-0", "side-1"]


def test_a_fault_of_the_second_side_is_told_as_its_own(service):
    service.desk.askers[1] = replace(service.desk.askers[1], solver=None)
    *_, answered, last = asked(service, compare=True)
    assert answered["side"] == 0 and "answer" in answered
    assert last["side"] == 1 and "log has the reason" in last["error"]


def test_one_side_alone_compares_nothing_and_its_page_offers_nothing(peers, service):
    page = httpx.get(service.url).text
    assert "<label hidden>" not in page
    with agent_service(*peers[:2]) as alone:
        assert {event["side"] for event in asked(alone, compare=True)} == {0}
        assert "<label hidden>" in httpx.get(alone.url).text


def test_a_follow_up_carries_what_was_said(service, peers):
    asked(service, "Who founded Velmar?", earlier=[[QUESTION, "the river Sendra"]])
    prompt = peers[2][-1]["messages"][1]["content"]
    assert f"{QUESTION} the river Sendra\nNow answer:\nWho founded Velmar?" in prompt


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "JSON"),
        (b'{"question": "  "}', "question: "),
        (json.dumps({"question": "w" * 8193}), "question: "),
        (json.dumps({"question": QUESTION, "earlier": [["Who?", "I"]] * 4}), "earlier: "),
        (json.dumps({"question": QUESTION, "earlier": [["Who?"]]}), "earlier.0"),
        (b'{"question": "\\ud83d"}', "JSON"),
    ],
)
def test_a_request_that_is_none_is_refused_in_words(service, body, why):
    refused = httpx.post(f"{service.url}/ask", content=body)
    assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_a_longer_body_than_any_question_is_refused(service):
    assert httpx.post(f"{service.url}/ask", content=b" " * (257 << 10)).status_code == 413


def test_a_failed_search_is_told_and_so_is_one_that_cannot_work(peers):
    with serving((500, "broken")) as search, agent_service(peers[0], search.url) as service:
        *_, last = asked(service)
        assert last["answer"]["state"] == "failed" and "search failed" in last["answer"]["failure"]
    with serving((404, "no such path")) as search, agent_service(peers[0], search.url) as service:
        *_, last = asked(service)
        assert "404" in last["error"]


def test_a_client_that_leaves_frees_its_place(peers):
    with serving((0, "")) as search, agent_service(peers[0], search.url, places=1) as service:
        body = {"question": QUESTION}
        with httpx.stream("POST", f"{service.url}/ask", json=body, timeout=30) as stream:
            lines = stream.iter_lines()  # the stream is closed with it
            assert "searching" in next(lines)
            busy = httpx.post(f"{service.url}/ask", json=body)
            assert busy.status_code == 429 and int(busy.headers["retry-after"]) > 0
            assert "again" in busy.json()["error"]["message"]
        wait_for(lambda: not service.desk._running, 10)
        with httpx.stream("POST", f"{service.url}/ask", json=body, timeout=30) as stream:
            assert stream.status_code == 200
    assert service.desk.figures.left._value.get() == 2


def test_the_page_loads_nothing_and_runs_only_its_own_script(service):
    page = httpx.get(service.url)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        assert policy[rule] == f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|url\(|//\w+\.|innerHTML|style=""", page.text)
