"""MCP over HTTP: the SDK's own client against the service, in both eras of the protocol."""

import asyncio
import json

import anyio
import httpx
import pytest
from agent_service import ANSWERS, HOSTILE, SENTENCE, Later, agent_service, passages, script
from mcp import Client
from starlette.responses import Response

from drzero.agent.server import events
from drzero.agent.server import mcp as ours
from drzero.ops.notices import plain

QUESTION = "Where does Velmar lie?"
HEADERS = {"Accept": "application/json, text/event-stream"}
WHO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
GREETING = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": WHO}


@pytest.fixture
def serve(start_peer):
    running = []

    def start(*, slow=False, model=None, found=passages, **options):
        answer = model or ((lambda body: Later(script(body))) if slow else script)
        peers = start_peer("/v1/chat/completions", answer), start_peer("/retrieve", found)
        service = agent_service(*(peer.url for peer in peers), **options)
        running.append(service)
        return service.__enter__()

    yield start
    for service in running:
        service.__exit__(None, None, None)


@pytest.fixture(params=["legacy", "2026-07-28", "auto"])
def mode(request):
    return request.param


def asking(service, mode, work):
    """Run `work` with a connected client."""

    async def run():
        async with Client(f"{service.url}/mcp", mode=mode) as client:
            return await work(client)

    return asyncio.run(run())


def called(service, name, mode="legacy", **arguments):
    return asking(service, mode, lambda client: client.call_tool(name, arguments))


def text_of(result):
    [content] = result.content
    return content.text


async def until(condition):
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.02)


def test_the_tools_say_what_they_take_and_give_and_when_to_use_which(serve, mode):
    tools = asking(serve(), mode, lambda client: client.list_tools()).tools
    assert [tool.name for tool in tools] == ["search", "ask"]
    for tool in tools:
        assert "Use it" in tool.description and len(tool.description) < 250
        assert tool.annotations.read_only_hint
        assert "index" in tool.output_schema["properties"]
    assert tools[1].input_schema["required"] == ["question"]


def test_a_search_gives_passages_as_text_and_as_data(serve, mode):
    service = serve()
    result = called(service, "search", mode, query="Velmar", limit=2)
    first, second = result.structured_content["passages"]
    assert (first["id"], first["title"]) == ("velmar", "Velmar") and SENTENCE in first["text"]
    assert result.structured_content["index"] == service.desk.index
    shown = [f"[{n}] {one['title']} ({one['id']})\n{one['text']}" for n, one in enumerate((first, second), 1)]
    assert text_of(result) == plain("\n\n".join(shown)) and not result.is_error
    assert called(serve(found=lambda _: {"result": [[]]}), "search", query="x").structured_content == {
        "query": "x",
        "passages": [],
        "index": service.desk.index,
    }


def test_an_answer_comes_with_evidence_and_who_gave_it(serve, mode):
    service = serve()
    result = called(service, "ask", mode, question=QUESTION)
    answered = result.structured_content
    assert (answered["answer"], answered["state"], answered["note"]) == (ANSWERS[QUESTION], "supported", None)
    assert answered["searches"] == [QUESTION]
    assert (answered["model"], answered["iteration"]) == ("side-0", None)
    assert [source["evidence"] for source in answered["sources"]] == [SENTENCE, None]
    answer, sources, identity = text_of(result).split("\n\n")
    assert answer == ANSWERS[QUESTION] and f"[1] Velmar (velmar): {SENTENCE}" in sources
    assert identity == f"(model side-0; index {service.desk.index})"


@pytest.mark.parametrize(
    ("question", "state", "words"),
    [
        ("Who founded Velmar?", "unsupported", "Nobody\n\nNo passage it read contains this answer."),
        ("Who knows?", "none", "The agent gave no answer."),
        ("Who is hostile?", "supported", plain(ANSWERS["Who is hostile?"])),
    ],
)
def test_what_an_answer_is_worth_is_said(serve, question, state, words):
    result = called(serve(), "ask", question=question)
    assert result.structured_content["state"] == state
    assert result.structured_content["answer"] == (ANSWERS[question] or None)
    assert text_of(result).startswith(f"{words}\n\n") and not {"\x1b", "\u202e"} & set(text_of(result))
    if state == "supported":
        assert HOSTILE in result.structured_content["sources"][0]["title"]


def test_searches_are_told_before_the_result_and_silence_is_broken(serve, mode, monkeypatch):
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.3)
    told = []

    async def ask(client):
        async def note(progress, total, message):
            told.append((progress, message))

        return await client.call_tool("ask", {"question": QUESTION}, progress_callback=note)

    asking(serve(slow=True), mode, ask)
    numbers, messages = zip(*told, strict=True)
    assert list(numbers) == list(range(1, len(told) + 1))
    searched = messages.index(f"searching: {QUESTION}")
    assert messages[searched + 1].startswith("found: Velmar, Title ")
    assert set(messages[:searched]) == set(messages[searched + 2 :]) == {"still at it"}


def test_a_cancelled_question_frees_its_place(serve, mode):
    service = serve(slow=True, places=1)

    async def leave(client):
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "ask", {"question": QUESTION})
            await until(lambda: service.desk._running)
            busy = await client.call_tool("ask", {"question": QUESTION})
            group.cancel_scope.cancel()
        await until(lambda: not service.desk._running)
        return busy, await client.call_tool("ask", {"question": QUESTION})

    busy, answered = asking(service, mode, leave)
    assert busy.is_error and "1 questions are being answered: ask again" in text_of(busy)
    assert answered.structured_content["state"] == "supported"
    assert service.desk.figures.left._value.get() == 1


def test_a_client_that_hangs_up_frees_its_place(serve):
    service = serve(slow=True)

    async def hang_up():
        async with httpx.AsyncClient(base_url=service.url, headers=HEADERS, trust_env=False) as client:
            greeted = await client.post("/mcp", json=GREETING)
            session = {"mcp-session-id": greeted.headers["mcp-session-id"]}
            params = {"name": "ask", "arguments": {"question": QUESTION}}
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
            async with client.stream("POST", "/mcp", json=call, headers=session):
                await until(lambda: service.desk._running)
            await until(lambda: not service.desk._running)

    asyncio.run(hang_up())
    assert service.desk.figures.left._value.get() == 1


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("answer", {"question": "x"}, "there is no tool 'answer': use search or ask"),
        ("ask", {}, "question: Field required"),
        ("ask", {"question": " "}, "question: String should have at least 1 character"),
        ("ask", {"question": "x" * 8193}, "question: String should have at most 8192 characters"),
        ("ask", {"question": "x", "topk": 3}, "topk: Extra inputs are not permitted"),
        ("search", {"query": "x", "limit": 0}, "limit: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_calls_are_results_in_words(serve, name, arguments, words):
    result = called(serve(), name, **arguments)
    assert result.is_error and words in text_of(result) and result.structured_content is None
    assert "\n" not in text_of(result) and "http" not in text_of(result)


def test_a_service_that_fails_is_a_result_in_words(serve):
    broken = serve(model=lambda _: 503, deadline_s=1)
    result = called(broken, "ask", question=QUESTION)
    assert result.is_error and "the question failed: " in text_of(result) and "1 s" in text_of(result)
    refused = called(serve(found=lambda _: 400), "search", query="x")
    assert refused.is_error and "HTTP 400" in text_of(refused)


def test_an_unexpected_error_stays_in_the_log(serve, monkeypatch, caplog):
    def bug(*_):
        raise KeyError("secret")

    monkeypatch.setattr(ours, "sources_of", bug)
    result = called(serve(), "search", query="x")
    assert result.is_error and "its log has the reason" in text_of(result)
    assert "secret" in caplog.text


def test_an_answer_that_takes_too_long_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(ours, "PATIENCE_S", 0.3)
    monkeypatch.setattr(ours, "_MARGIN_S", -30)
    service = serve(slow=True, deadline_s=30)
    result = called(service, "ask", question=QUESTION)
    assert result.is_error and text_of(result).startswith("no answer in time. If the agent has just been")
    assert service.desk._running == 0


def test_lone_surrogates_of_a_model_do_not_end_the_session(serve):
    def model(body):
        message = script(body)["choices"][0]["message"]
        if message["content"]:
            message["content"] = "<answer>\ud800 Sendra</answer>"
        content = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
        return Response(content, media_type="application/json")

    result = called(serve(model=model), "ask", question=QUESTION)
    assert json.dumps(result.structured_content).encode() and "Sendra" in text_of(result)
