"""The search tool as veRL calls it, against an HTTP peer."""

import asyncio

import pytest
from conftest import unused_port
from scripted_search import serving

from search.client import SearchRequestError
from verl_ext.method.passages import format_passages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA
from verl_ext.method.trajectory import SearchCall
from verl_ext.rollout.search_tool import UNAVAILABLE, SearchTool

LIMIT = 200
PASSAGE = {"title": "Vell", "text": "a river " * 100, "contents": "Vell\n" + "a river " * 100}


def tool_of(url, deadline_s=30.0):
    settings = {"retrieval_url": url, "topk": 2, "deadline_s": deadline_s, "response_limit": LIMIT}
    return SearchTool(settings, None)


def search(url, *queries, deadline_s=30.0):
    """The answered call, in a fresh event loop."""
    tool = tool_of(url, deadline_s)

    async def run():
        instance_id, _ = await tool.create(create_kwargs={})
        asked = SearchCall("", queries)
        response, reward, outcome = await tool.execute(instance_id, {"call": asked})
        await tool.release(instance_id)
        assert reward == 0.0 and outcome["call"].response == response.text
        return outcome["call"]

    return asyncio.run(run())


def test_a_response_has_all_passages_within_the_limit():
    busy_once = (503, {"detail": "the queue is full"})
    with serving(busy_once, (200, {"result": [[PASSAGE] * 2] * 2}), retry_after="1") as peer:
        call = search(peer.url, "one", "two")
    assert call.response == format_passages(["one", "two"], [[PASSAGE] * 2] * 2, LIMIT)
    assert len(call.response) <= LIMIT and call.response.count("Vell: a river") == 4
    assert call.answered and call.error is None
    asked = {"queries": ["one", "two"], "topk": 2, "return_scores": False}
    assert [body for _, body in peer.requests] == [asked] * 2


def test_a_service_that_is_down_or_keeps_failing_is_marked_as_failed(start_peer):
    failing = start_peer("/retrieve", lambda _: 503).url
    for url, cause in ((f"http://127.0.0.1:{unused_port()}", "ConnectError"), (failing, "503")):
        call = search(url, "one", deadline_s=0.5)
        assert call.response == UNAVAILABLE and call.failed and cause in call.error


@pytest.mark.parametrize(
    ("status", "detail"), [(413, "the body is longer than 9 bytes"), (422, "too long - at `$.queries[...]`")]
)
def test_refused_queries_are_the_models_mistake(status, detail):
    with serving((status, {"detail": detail})) as strict:
        call = search(strict.url, "one")
    assert (call.failed, call.valid) == (False, False)
    assert call.error == f"the search service refuses these queries ({detail})"
    assert call.response.startswith(f"Error: {call.error}. A call looks like ")


def test_a_wrong_token_ends_the_run():
    refusal = (401, {"detail": "a bearer token is needed"})
    with serving(refusal) as closed, pytest.raises(SearchRequestError, match="HTTP 401: a bearer token is"):
        search(closed.url, "one")


def test_the_model_is_shown_the_projects_own_schema():
    shown = tool_of("http://127.0.0.1:1").tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert shown["function"]["name"] == SEARCH_TOOL_SCHEMA["function"]["name"]
    assert list(shown["function"]["parameters"]["properties"]) == ["query_list"]
