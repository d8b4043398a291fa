"""The search tool as veRL calls it, against an HTTP peer."""

import asyncio
from typing import Any

import pytest
from conftest import unused_port
from scripted_search import serving

from search.client import SearchRequestError
from verl_ext.method.passages import format_passages
from verl_ext.method.tool_calls import SEARCH_TOOL_SCHEMA
from verl_ext.method.trajectory import SearchCall
from verl_ext.rollout.search_tool import UNAVAILABLE, SearchTool

LIMIT = 200
ASKED = {"queries": ["one"], "topk": 2}
PASSAGE = {"title": "Vell", "text": "a river " * 100, "contents": "Vell\n" + "a river " * 100}


def library(request: dict[str, Any]) -> dict[str, Any]:
    return {"result": [[PASSAGE] * request["topk"] for _ in request["queries"]]}


def tool_of(url: str, deadline_s: float = 30.0) -> SearchTool:
    settings = {"retrieval_url": url, "topk": 2, "deadline_s": deadline_s, "response_limit": LIMIT}
    return SearchTool(settings, None)


def search(url: str, queries: list[str], deadline_s: float = 30.0) -> tuple[str | None, dict[str, Any]]:
    """The tool's text and outcome, in a fresh event loop."""
    tool = tool_of(url, deadline_s)

    async def run() -> tuple[str | None, dict[str, Any]]:
        instance_id, _ = await tool.create(create_kwargs={})
        asked = SearchCall("", tuple(queries))
        response, reward, outcome = await tool.execute(instance_id, {"call": asked})
        await tool.release(instance_id)
        call = outcome["call"]
        assert reward == 0.0 and call.response == response.text
        return response.text, {"failed": call.failed, "refused": not call.valid, "error": call.error}

    return asyncio.run(run())


def test_a_response_has_all_passages_within_the_limit(start_peer):
    peer = start_peer("/retrieve", library)
    text, outcome = search(peer.url, ["one", "two"])
    assert text == format_passages(["one", "two"], [[PASSAGE] * 2] * 2, LIMIT)
    assert text is not None and len(text) <= LIMIT and text.count("Vell: a river") == 4
    assert outcome == {"failed": False, "refused": False, "error": None}
    assert peer.requests == [{"queries": ["one", "two"], "topk": 2, "return_scores": False}]


def test_a_service_that_is_down_or_keeps_failing_is_marked_as_failed(start_peer):
    failing = start_peer("/retrieve", lambda _: 503).url
    for url, cause in ((f"http://127.0.0.1:{unused_port()}", "ConnectError"), (failing, "503")):
        text, outcome = search(url, ["one"], deadline_s=0.5)
        assert text == UNAVAILABLE
        assert outcome["failed"] and cause in outcome["error"]


def test_a_busy_service_that_recovers_in_time_is_no_failure():
    busy_twice = [(503, {"detail": "the queue is full"})] * 2
    with serving(*busy_twice, (200, library(ASKED)), retry_after="1") as busy:
        text, outcome = search(busy.url, ["one"], deadline_s=20)
    assert text == format_passages(["one"], library(ASKED)["result"], LIMIT)
    assert outcome == {"failed": False, "refused": False, "error": None}
    assert len(busy.requests) == 3


@pytest.mark.parametrize(
    ("status", "detail"), [(413, "the body is longer than 9 bytes"), (422, "too long - at `$.queries[...]`")]
)
def test_refused_queries_are_the_models_mistake(status, detail):
    with serving((status, {"detail": detail})) as strict:
        text, outcome = search(strict.url, ["one"])
    error = f"the search service refuses these queries ({detail})"
    assert text is not None and text.startswith(f"Error: {error}. A call looks like ")
    assert outcome == {"failed": False, "refused": True, "error": error}


def test_a_wrong_token_ends_the_run():
    refusal = (401, {"detail": "a bearer token is needed"})
    with serving(refusal) as closed, pytest.raises(SearchRequestError, match="HTTP 401: a bearer token is"):
        search(closed.url, ["one"])


def test_the_model_is_shown_the_projects_own_schema():
    shown = tool_of("http://127.0.0.1:1").tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert shown["function"]["name"] == SEARCH_TOOL_SCHEMA["function"]["name"]
    assert list(shown["function"]["parameters"]["properties"]) == ["query_list"]
