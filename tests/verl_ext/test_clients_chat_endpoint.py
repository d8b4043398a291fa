"""Conversations with a chat endpoint, over a scripted server on loopback."""

import asyncio
import json
import socket

import pytest
from conftest import Peer
from fastapi.responses import Response
from scripted_endpoint import KEY as SCRIPTED_KEY
from scripted_endpoint import MODEL, scripted_endpoint

from drzero.ops.bearer import MODEL_KEY
from verl_ext.clients.chat_endpoint import ChatEndpoint, SolverServerError, _seconds
from verl_ext.clients.solver_agent import SolverAgent
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_calls import render_tool_call

ANSWER = "<think>So.</think>\n<answer>Kestmoor</answer>"
NAMED = "<answer>Kestmoor</answer>"
DRAFT = f"Maybe {render_tool_call(['Ostrel'])}"
KEY = "sk-planted-secret"


class Library:
    """A search service that finds one passage for every query."""

    async def retrieve(self, queries, topk=None):
        return [[{"title": query, "text": f"{query} is near Kestmoor."}] for query in queries]


def said(content=None, calls=(), finish="", **more):
    """A chat completion. A call is its arguments as text, or a whole function."""
    named = [call if isinstance(call, dict) else {"name": "search", "arguments": call} for call in calls]
    asked = [{"id": f"id{n}", "type": "function", "function": one} for n, one in enumerate(named)]
    message = {"role": "assistant", "content": content, **({"tool_calls": asked} if asked else {}), **more}
    finish = finish or ("tool_calls" if asked else "stop")
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 7},
    }


def escaped(reply):
    """Written in ASCII, so that it may have half of a surrogate pair."""
    return Response(json.dumps(reply), media_type="application/json")


def query(*queries):
    return json.dumps({"query_list": list(queries)})


def attempt(peer, endpoint=None, times=1, **limits):
    """Play attempts one after another over one endpoint."""

    async def play():
        named = {"model": "a-model", "key_variable": MODEL_KEY, "retries": 2} | (endpoint or {})
        chat = ChatEndpoint(f"{peer.url}/v1", **named)
        settings = {"topk": 3, "max_tokens_per_turn": 50, "max_context_tokens": 1000} | limits
        agent = SolverAgent(chat.url, chat.model, None, Library(), endpoint=chat, **settings)
        try:
            return [await agent.attempt("Where is Ostrel?", seed=5) for _ in range(times)], chat
        finally:
            await agent.aclose()
            await chat.aclose()

    return asyncio.run(play())


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch):
    monkeypatch.setenv(MODEL_KEY, KEY)


@pytest.fixture
def serve(start_peer):
    def start(*replies):
        def reply(_):
            return replies[min(len(peer.requests), len(replies)) - 1]

        peer = start_peer("/v1/chat/completions", reply)
        return peer

    return start


def test_a_call_is_answered_and_the_next_turn_sees_the_passages(serve):
    peer = serve(said(None, [query("Ostrel")], reasoning_content="I look it up."), said(ANSWER))
    (played,), _ = attempt(peer)
    assert (played.finished, played.answer, played.searches) == (True, "Kestmoor", 1)
    assert (played.tokens_in, played.tokens_out) == (200, 14)
    first, _ = played.trajectory.turns
    assert first.text.startswith("<think>I look it up.</think>") and "<tool_call>" in first.text
    assert first.calls[0].queries == ("Ostrel",) and first.calls[0].answered
    one, two = peer.requests
    assert one["messages"] == solver_messages("Where is Ostrel?", "full", 5)
    assert (one["model"], one["seed"], one["temperature"], one["max_tokens"]) == ("a-model", 5, 1.0, 50)
    assert [message["role"] for message in two["messages"][2:]] == ["assistant", "tool"]
    shown = {"tool_call_id": "id0", "content": "[1] Ostrel: Ostrel is near Kestmoor."}
    assert two["messages"][-1] == {"role": "tool", **shown}


def test_calls_in_the_text_are_answered_in_text(serve):
    peer = serve(said(f"<think>So.</think>\n{render_tool_call(['Ostrel'])}"), said(ANSWER))
    (played,), _ = attempt(peer)
    assert played.answer == "Kestmoor" and played.searches == 1
    assert peer.requests[1]["messages"][-1]["role"] == "user"
    assert "<tool_response>\n[1] Ostrel" in peer.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("reply", "text", "answer"),
    [
        (said(f"{DRAFT}</think>{NAMED}"), f"<think>{DRAFT}</think>{NAMED}", "Kestmoor"),
        (said(NAMED, reasoning_content=DRAFT), f"<think>{DRAFT}</think>\n{NAMED}", "Kestmoor"),
        (said(f"<think>{DRAFT} {NAMED}"), f"<think>{DRAFT} {NAMED}", None),
        (said("<answer>\ud83d</answer>"), "<answer>?</answer>", "?"),
        (said("<answer>\ud83d\ude00</answer>"), "<answer>\U0001f600</answer>", "\U0001f600"),
        (said(NAMED, reasoning_content="\ude00"), f"<think>?</think>\n{NAMED}", "Kestmoor"),
    ],
)
def test_a_turn_is_read_as_text_with_its_thinking(serve, reply, text, answer):
    (played,), _ = attempt(serve(escaped(reply)))
    assert [turn.text for turn in played.trajectory.turns] == [text]
    assert (played.finished, played.answer, played.searches) == (True, answer, 0)


def test_half_of_a_surrogate_pair_in_a_call_is_searched_as_a_question_mark(serve):
    asked = said(None, ['{"query_list": ["Ostrel \ud83d"]}', query("Ostrel \ude00")])
    (played,), _ = attempt(serve(escaped(asked), said(ANSWER)))
    first, second = played.trajectory.calls
    assert first.queries == ("Ostrel ?",) and first.answered and not second.valid
    assert json.dumps(played.trajectory.to_dict(), ensure_ascii=False).encode()
    assert played.answer == "Kestmoor"


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("no json", "not JSON"),
        ('{"query_list": "text"}', "not a list of strings"),
        ({"name": "browse", "arguments": query("x")}, "no such tool"),
        ('{"query_list": ["a </tool_call> b"]}', "a tag in it"),
    ],
)
def test_an_invalid_call_is_explained_to_the_model(serve, call, fault):
    peer = serve(said(None, [call]), said(ANSWER))
    (played,), _ = attempt(peer)
    (found,) = played.trajectory.calls
    assert not found.valid and fault in str(found.error)
    assert fault in peer.requests[1]["messages"][-1]["content"]


def test_calls_beyond_the_limit_are_neither_answered_nor_sent_back(serve):
    peer = serve(said(None, [query(f"q{n}") for n in range(7)]), said(ANSWER))
    (played,), _ = attempt(peer)
    assert (len(played.trajectory.calls), played.searches) == (7, 5)
    sent = peer.requests[1]["messages"]
    answered = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert answered == [call["id"] for call in sent[2]["tool_calls"]] == [f"id{n}" for n in range(5)]


def test_a_conversation_ends_at_its_token_limit(serve):
    peer = serve(said(None, [query("Ostrel")]))
    (played,), _ = attempt(peer, max_context_tokens=130)
    assert [request["max_tokens"] for request in peer.requests] == [50, 23, 23, 23, 23]
    assert played.finished and played.answer is None


def too_long(message, **named):
    error = {"message": message, "type": "BadRequestError", **named}
    return Response(json.dumps({"error": error}), 400, media_type="application/json")


@pytest.mark.parametrize(
    "refusal",
    [
        too_long("shorten it", code="context_length_exceeded"),  # OpenAI, and the reference engine
        too_long("This model's maximum context length is 512 tokens. However, you requested 600", code=400),
        too_long("The input (600 tokens) is longer than the model's context length (512 tokens).", code=400),
    ],
)
def test_a_conversation_that_outgrows_the_models_context_has_ended(serve, refusal):
    (played,), chat = attempt(serve(said(None, [query("Ostrel")]), refusal))
    assert (played.finished, played.answer, len(played.trajectory.turns)) == (True, None, 1)
    assert chat.requests == 2 and not chat.failures
    # A question that is too long by itself has not been tried.
    assert [one.finished for one in attempt(serve(said(ANSWER), refusal), times=2)[0]] == [True, False]


def test_a_turn_after_more_passages_than_fit_is_cut_off(serve):
    longer = {"usage": {"prompt_tokens": 125, "completion_tokens": 7}}
    replies = [said(None, [query("Ostrel")]), said(ANSWER) | longer]
    answers = [attempt(serve(*replies), max_context_tokens=limit)[0][0].answer for limit in (131, 132)]
    assert answers == [None, "Kestmoor"]


def test_a_cut_off_turn_is_marked(serve):
    (played,), _ = attempt(serve(said("<think>So and so and", finish="length")))
    assert played.trajectory.turns[0].truncated and played.answer is None


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, r"does not let us in \(HTTP 401.*OPENAI_API_KEY is not accepted.*endpoint_key="),
        (404, r"does not have the model 'a-model' \(HTTP 404.*endpoint_model="),
        (402, "budget is used up"),
        (400, r"refused a request for 'a-model' \(HTTP 400"),
    ],
)
def test_a_refused_first_request_is_an_error_at_once(serve, status, expected):
    peer = serve(status)
    with pytest.raises(SolverServerError, match=expected) as refused:
        attempt(peer)
    assert len(peer.requests) == 1 and KEY not in str(refused.value)


def test_a_key_repeated_by_the_server_is_not_shown():
    with scripted_endpoint() as server, pytest.raises(SolverServerError, match="key provided: ") as refused:
        attempt(Peer(server.url.removesuffix("/v1")))
    assert server.keys == {f"Bearer {KEY}"} and KEY not in str(refused.value)


def test_failed_requests_are_retried_and_counted(serve):
    (played,), chat = attempt(serve(503, 429, said(ANSWER)))
    assert played.finished and played.answer == "Kestmoor"
    assert chat.requests == 3
    assert sorted(reason.partition(":")[0] for reason in chat.failures) == ["HTTP 429", "HTTP 503"]
    (played,), chat = attempt(serve(503))
    assert not played.finished and played.answer is None and "HTTP 503" in str(played.failure)
    assert (chat.requests, chat.failures.total()) == (3, 3)


def body(content, **headers):
    return Response(content, headers={"content-type": "application/json", **headers})


def with_message(message):
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


FUNCTION = {"name": "search", "arguments": "{}"}
BAD = {
    "no message": (with_message(None), "choices.0.message: "),
    "a text as message": (with_message("hi"), "choices.0.message: "),
    "a number as content": (with_message({"content": 5}), "content"),
    "calls as text": (with_message({"tool_calls": "search"}), "tool_calls"),
    "a call as text": (with_message({"tool_calls": ["search"]}), "tool_calls.0"),
    "a call without function": (with_message({"tool_calls": [{"id": "a"}]}), "tool_calls.0.function"),
    "a function as text": (with_message({"tool_calls": [{"function": "f"}]}), "tool_calls.0.function"),
    "a name as number": (with_message({"tool_calls": [{"function": FUNCTION | {"name": 1}}]}), "name"),
    "arguments as number": (with_message({"tool_calls": [{"function": FUNCTION | {"arguments": 1}}]}), "arg"),
    "no choices": ({"choices": []}, "choices: "),
    "choices as object": ({"choices": {"0": {}}}, "choices: "),
    "a list": (["hi"], "dict"),
    "null": (body("null"), "dict"),
    "an error": ({"error": {"message": "the backend is gone"}}, "the backend is gone"),
    "an error as text": ({"error": "the backend is gone"}, "the backend is gone"),
    "an error in bytes": (body('{"error": "gone \\ud800"}'), "gone ?"),
    "html": (Response("<html>Sign in</html>", media_type="text/html"), "(no JSON): <html>Sign in"),
    "nothing": (body(b""), "(no JSON)"),
    "bytes": (body(b"\xff\xfe\x00"), "(no JSON)"),
    "deep": (body("[" * 100_000 + "]" * 100_000), "(nested too deeply)"),
    "a long number": (body('{"choices": ' + "1" * 5000 + "}"), "(no JSON)"),
    "a wrong encoding": (body("{}", **{"content-encoding": "gzip"}), "DecodingError"),
    "a reason as list": ({"choices": [{"message": {"content": "a"}, "finish_reason": []}]}, "finish_reason"),
    "aborted": ({"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}, "'abort'"),
}


@pytest.mark.parametrize(("reply", "words"), BAD.values(), ids=BAD)
def test_a_bad_answer_after_a_good_one_is_a_failed_request_and_repeated(serve, reply, words):
    played, chat = attempt(serve(said(ANSWER), reply, said(ANSWER), reply), times=3)
    assert [one.answer for one in played] == ["Kestmoor", "Kestmoor", None]
    assert (chat.requests, chat.failures.total()) == (6, 4)
    assert words in str(played[2].failure) and "/v1/chat/completions failed: " in str(played[2].failure)


@pytest.mark.parametrize(
    ("reply", "words"), [BAD[name] for name in ("no message", "an error", "html", "deep", "null")]
)
def test_an_endpoint_whose_first_answer_is_bad_is_named_with_its_reason(serve, reply, words):
    peer = serve(reply)
    with pytest.raises(SolverServerError) as error:
        attempt(peer)
    assert f"{peer.url}/v1/chat/completions did not answer as an OpenAI endpoint" in str(error.value)
    assert words in str(error.value) and len(peer.requests) == 1


USAGES = [None, 5, "many", [], {"prompt_tokens": "5", "completion_tokens": None}, {"prompt_tokens": -1}]
USAGES += [{"prompt_tokens": 1e300}, {"prompt_tokens": [1]}]


@pytest.mark.parametrize("usage", USAGES)
def test_usage_that_is_no_count_is_no_usage(serve, usage):
    (played,), chat = attempt(serve(said(ANSWER) | {"usage": usage}))
    assert (played.answer, played.tokens_in, played.tokens_out) == ("Kestmoor", 0, 0)
    assert (chat.without_usage, chat.failures.total()) == (1, 0)


HEADERS = [("nan", None), ("-nan", None), ("", None), ("soon", None)]
HEADERS += [("Wed, 21 Oct 2026 07:28:00 GMT", None), ("0", 0.0), ("-5", 0.0), ("2.5", 2.5)]
HEADERS += [("9" * 400, 60.0), ("inf", 60.0), ("1e999", 60.0)]


@pytest.mark.parametrize(("header", "pause_s"), HEADERS)
def test_the_pause_that_a_server_asks_for_is_bounded(header, pause_s):
    assert _seconds(header) == pause_s


def test_an_endpoint_that_never_answers_is_given_up(serve):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        chat = ChatEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "a-model")
        with pytest.raises(SolverServerError, match=rf"^{chat.url} did not answer within 0.2 s$"):
            asyncio.run(chat.greet([{"role": "user", "content": "Hello"}], 0.2))


@pytest.mark.parametrize(
    "place",
    ["http://127.0.0.1:9", "http://no-such-host.invalid", f"http://{'a' * 80}.example", "http://a..b"],
)
def test_an_endpoint_that_is_away_is_named_with_the_reason(place):
    chat = ChatEndpoint(f"{place}/v1", "a-model", retries=0)
    with pytest.raises(SolverServerError, match=rf"^{place}/v1/chat/completions does not answer: \w+"):
        asyncio.run(chat.greet([{"role": "user", "content": "Hello"}], 30))


def test_a_later_refusal_ends_only_its_own_conversation(serve):
    played, _ = attempt(serve(said(ANSWER), 400, said(ANSWER)), times=3)
    assert [one.finished for one in played] == [True, False, True]
    assert "refuses the conversation (HTTP 400" in str(played[1].failure)


def test_a_filtered_answer_is_unfinished(serve):
    (played,), _ = attempt(serve(said("", finish="content_filter")))
    assert not played.finished and "filter" in str(played.failure)


def test_a_rejected_parameter_is_renamed_or_dropped(monkeypatch):
    monkeypatch.setenv(MODEL_KEY, SCRIPTED_KEY)
    with scripted_endpoint(picky=True) as server:
        peer = Peer(server.url.removesuffix("/v1"))
        (played,), chat = attempt(peer, {"model": MODEL})
    assert played.finished and played.answer
    assert chat.left_out == {"temperature"} and chat.failures.total() == 0
    assert "max_completion_tokens" in server.requests[-1] and "max_tokens" not in server.requests[-1]
