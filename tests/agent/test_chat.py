"""OpenAI's own client against the service, with a scripted model and search."""

import json
import threading

import httpx
import openai
import pytest
from agent_service import (
    ANSWERS,
    HOSTILE,
    SENTENCE,
    TITLE,
    UNSEARCHED,
    Later,
    agent_service,
    passages,
    script,
)
from search_parts import wait_for

from drzero.agent.server import events
from drzero.agent.server.chat_text import answer_in

QUESTION = "Where does Velmar lie?"
UNSUPPORTED = "Nobody\n\n*No passage it read contains this answer.*"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
def peers(start_peer):
    return start_peer("/v1/chat/completions", script), start_peer("/retrieve", passages)


@pytest.fixture
def slow(start_peer):
    model = start_peer("/v1/chat/completions", lambda body: Later(script(body)))
    return model.url, start_peer("/retrieve", passages).url


@pytest.fixture
def service(peers):
    with agent_service(*(peer.url for peer in peers), sides=2, lists_sources=True) as running:
        yield running


@pytest.fixture
def client(service):
    with client_of(service) as client:
        yield client


def client_of(service, **options):
    return openai.OpenAI(base_url=f"{service.url}/v1", **{"api_key": "any", "max_retries": 0} | options)


def asking(client, *said, **options):
    """Ask in a conversation of user and assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return client.chat.completions.create(**{"model": "side-0", "messages": messages} | options)


def said_by(chunks, key):
    return "".join(getattr(chunk.choices[0].delta, key, None) or "" for chunk in chunks if chunk.choices)


def test_an_answer_comes_with_its_sources_in_the_text_and_as_annotations(client, service):
    completion = asking(client, QUESTION)
    message, usage = completion.choices[0].message, completion.usage
    assert message.content.split("\n\n")[0] == ANSWERS[QUESTION]
    (annotation,) = message.annotations
    cited = annotation.url_citation
    assert (cited.title, cited.url) == ("Velmar", f"{service.url}/sources/velmar")
    assert message.content[cited.start_index : cited.end_index] == f"[Velmar]({cited.url})"
    assert SENTENCE in message.content and "Searching: " in message.reasoning_content
    assert completion.choices[0].finish_reason == "stop" and completion.model == "side-0"
    assert service.desk.index in completion.system_fingerprint
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_without_sources_in_the_text_the_annotations_cite_the_answer(peers):
    with agent_service(*(peer.url for peer in peers)) as service, client_of(service) as client:
        message = asking(client, QUESTION).choices[0].message
    cited = message.annotations[0].url_citation
    assert message.content == message.content[cited.start_index : cited.end_index] == ANSWERS[QUESTION]


def test_searches_stream_as_thoughts_and_the_stream_ends_as_openais(client):
    chunks = list(asking(client, QUESTION, stream=True, stream_options={"include_usage": True}))
    *said, last, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in said]
    assert deltas[0].role == "assistant" and not any("role" in delta.model_fields_set for delta in deltas[1:])
    thoughts = said_by(said, "reasoning_content")
    assert thoughts.startswith(f"Searching: {QUESTION}\n\nFound: Velmar, ")
    text = said_by(said, "content")
    assert text.startswith(ANSWERS[QUESTION])
    (annotations,) = [delta.annotations for delta in deltas if hasattr(delta, "annotations")]
    place = annotations[0]["url_citation"]
    assert text[place["start_index"] : place["end_index"]] == f"[Velmar]({place['url']})"
    assert [chunk.choices[0].finish_reason for chunk in [*said, last]] == [None] * len(said) + ["stop"]
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert usage.choices == [] and usage.usage.total_tokens >= 0
    assert len({(chunk.id, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1


def test_a_stream_says_the_same_as_a_whole_answer(client):
    whole = asking(client, QUESTION).choices[0].message
    chunks = list(asking(client, QUESTION, stream=True))
    assert said_by(chunks, "content") == whole.content
    assert said_by(chunks, "reasoning_content") == whole.reasoning_content
    assert all(chunk.choices for chunk in chunks)  # no usage that was not asked for


def test_a_silent_stream_is_kept_alive(slow, monkeypatch):
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.3)
    body = {"model": "side-0", "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    with agent_service(*slow) as service:
        lines = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30).text.split("\n\n")
        with client_of(service) as client:
            assert ANSWERS[QUESTION] in said_by(asking(client, QUESTION, stream=True), "content")
    assert lines[0].startswith(":") and lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith((":", "data: {")) for line in lines[:-2])


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("Who founded Velmar?", f"{UNSUPPORTED}\n\n**What it read**\n\n1. [V"),
        ("Who knows?", "*The agent gave no answer.*\n\n**What it read**\n\n1. [Velmar]("),
        (UNSEARCHED, UNSUPPORTED),
    ],
)
def test_an_answer_without_support_is_said_as_such(client, question, said):
    message = asking(client, question).choices[0].message
    assert message.content.startswith(said) and message.annotations is None


def test_what_documents_say_reaches_a_front_end_as_text(client):
    message = asking(client, "Who is hostile?").choices[0].message
    answer, _, added = message.content.partition("**Sources**")
    added += message.reasoning_content
    assert "<" not in answer and answer_in(message.content) == f"It is {HOSTILE}"
    assert "<" not in added.replace("\\<", "") and "\x1b" not in added and "\u202e" not in added
    assert "\\<img src=x onerror=alert(1)\\>" in added
    assert message.annotations[-1].url_citation.title.startswith("Title <img")


OPEN_WEBUI = "### Task:\nGenerate a concise title summarizing the chat history.\n### Chat History:\nUSER: "
LIBRECHAT = 'Provide a concise, 5-word-or-less title for the conversation, using its same language. "Hi"'
N8N = "Generate a concise, descriptive title for this conversation based on the user's message.\n"
ATTACHED = "### Task:\nRespond to the user query using the context\n<context>\nIt rains.\n</context>\n"
LOBE = "You summarize the user's conversation into a title within 10 words"
EMOJI = "Your task is to reflect the speaker's likely facial expression through a fitting emoji."


@pytest.mark.parametrize(
    ("role", "task"),
    [
        ("user", OPEN_WEBUI),
        ("user", LIBRECHAT),
        ("user", EMOJI),
        (
            "user",
            "Please generate a four to five word title summarizing our conversation without any lead-in",
        ),
        ("system", N8N),
        ("system", f"Speak as a pirate.\n{ATTACHED}"),
        ("developer", LOBE),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_front_ends_own_task_costs_no_search(client, peers, capsys, role, task, stream):
    model, search = peers
    messages = [{"role": role, "content": f"{task} {UNSEARCHED}"}]
    messages += [] if role == "user" else [{"role": "user", "content": UNSEARCHED}]
    answered = client.chat.completions.create(
        model="side-0",
        messages=messages,
        stream=stream,
        max_tokens=20,
        stream_options={"include_usage": stream},
    )
    said = said_by(answered, "content") if stream else answered.choices[0].message.content
    assert said == TITLE
    (request,) = model.requests
    assert "tools" not in request and request["max_tokens"] == 20 and not search.requests
    assert request["messages"][-1]["content"].startswith(messages[-1]["content"])
    assert "answered without a search" in capsys.readouterr().out


@pytest.mark.parametrize(
    "question",
    [
        f"Give the title of the dialogue that names Velmar. {QUESTION}",
        f"What is the name for a conversation? {QUESTION}",
        f"Generate a list. {QUESTION} Then write a title for the essay.",
        f"Which ### Task: is this? {QUESTION}",
    ],
)
def test_a_question_that_looks_like_a_task_is_searched(client, peers, question):
    asking(client, question)
    assert peers[1].requests


def test_a_follow_up_question_comes_with_what_was_said(client, peers):
    first = asking(client, QUESTION).choices[0].message.content
    thinking = '<details type="reasoning"><summary>Thought</summary>Searching</details>\n'
    asking(client, "Lost?", "", QUESTION, thinking + first, "Who founded Velmar?")
    prompt = peers[0].requests[-1]["messages"][1]["content"]
    assert f"{QUESTION} {ANSWERS[QUESTION]}\n" in prompt and "Now answer:\nWho founded Velmar?\n" in prompt
    assert not any(other in prompt for other in ("Sources", "Thought", "http:", "Lost?"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("the river Sendra\n\n**Sources**\n\n1. [a](b)", "the river Sendra"),
        (f"{UNSUPPORTED}\n\n**What it read**\n\n1. [a](b)", "Nobody"),
        ("*The agent gave no answer.*", ""),
        ("<think>hm</think>\nIt has **Sources** in it\n\nand more", "It has **Sources** in it\n\nand more"),
        ("&#33;[a](b) and &#60;b>", "![a](b) and <b>"),
        ("<details" * 100_000, ("<details" * 100_000)[:16_000]),
    ],
)
def test_an_answer_is_found_in_what_a_client_sends_back(text, answer):
    assert answer_in(text) == answer


def test_each_side_is_a_model(client, service):
    assert [model.id for model in client.models.list()] == ["side-0", "side-1"]
    assert client.models.retrieve("side-1").id == "side-1"
    assert asking(client, QUESTION, model="side-1").model == "side-1"
    for ask in (lambda: client.models.retrieve("gpt-4o"), lambda: asking(client, QUESTION, model="gpt-4o")):
        with pytest.raises(openai.NotFoundError, match="'side-0' and 'side-1'") as refused:
            ask()
        assert refused.value.code == "model_not_found"


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1, "logprobs": False, "tools": [TOOL], "tool_choice": "auto", "user": "me", "seed": 7},
        {"max_tokens": 16, "temperature": 1.5, "top_p": 0.1, "stop": ["."], "presence_penalty": 1},
        {"max_completion_tokens": 16, "parallel_tool_calls": True, "metadata": {"a": "b"}, "store": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": "low"},
        {"extra_body": {"chat_id": "x", "session_id": None, "features": {"web_search": True}, "top_k": 4}},
    ],
)
def test_fields_that_clients_send_along_do_no_harm(client, options):
    assert asking(client, QUESTION, **options).choices[0].message.content.startswith(ANSWERS[QUESTION])


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}] * 2001}, "messages"),
        ({"messages": [{"role": "user", "content": "w " * 140_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": OPEN_WEBUI * 1500}] * 2}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_name(client, options, place, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        asking(client, QUESTION, stream=stream, **options)
    assert refused.value.param == place and place.split(".")[0] in refused.value.message


def test_a_question_comes_in_parts_and_an_older_image_does_no_harm(client, peers):
    parts = [{"type": "text", "text": "Where does"}, {"type": "text", "text": "Velmar lie?"}]
    first = [{"type": "text", "text": "What is it?"}, IMAGE]
    asking(client, first, "A town", parts)
    prompt = peers[0].requests[-1]["messages"][1]["content"]
    assert "What is it? A town" in prompt and "Now answer:\nWhere does\nVelmar lie?\n" in prompt


def test_a_clients_system_prompt_is_left_out_and_said_once(client, peers, capsys):
    messages = [{"role": "system", "content": "Speak as a pirate."}, {"role": "user", "content": QUESTION}]
    for _ in range(2):
        client.chat.completions.create(model="side-0", messages=messages)
    assert "pirate" not in json.dumps(peers[0].requests)
    assert capsys.readouterr().out.count("system prompt is left out") == 1


def test_a_model_that_refuses_is_the_requests_own_error_before_a_stream(start_peer, peers):
    model = start_peer("/v1/chat/completions", lambda body: 400)
    with (
        agent_service(model.url, peers[1].url) as service,
        client_of(service) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        asking(client, QUESTION, stream=True)
    assert refused.value.status_code == 503 and "HTTP 400" in refused.value.message


def test_one_too_many_is_told_when_to_come_back(slow):
    with agent_service(*slow, places=1) as service, client_of(service) as client:
        first = threading.Thread(target=asking, args=[client, QUESTION])
        first.start()
        wait_for(lambda: service.desk.figures.running.collect()[0].samples[0].value == 1, 10)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                asking(client, QUESTION, stream=stream)
            assert int(refused.value.response.headers["retry-after"]) > 0
        with client_of(service, max_retries=5) as patient:
            assert asking(patient, QUESTION).choices[0].message.content.startswith(ANSWERS[QUESTION])
        first.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", [QUESTION, OPEN_WEBUI])
def test_a_client_that_leaves_frees_its_place(slow, stream, question):
    with agent_service(*slow, places=1) as service:
        with (
            client_of(service, timeout=0.5) as hasty,
            pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)),
        ):
            list(asking(hasty, question, stream=stream))
        wait_for(lambda: service.desk.figures.left._value.get() == 1, 10)
        assert service.desk.figures.running._value.get() == 0
        with client_of(service) as client:
            assert asking(client, QUESTION).choices[0].message.content.startswith(ANSWERS[QUESTION])


def test_the_deadline_is_an_answer_and_no_client_asks_again(slow):
    with agent_service(*slow, deadline_s=0.5) as service, client_of(service, max_retries=2) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match=r"did not end within 0\.5 s") as late:
                asking(client, QUESTION, stream=stream)
            assert late.value.status_code == 504
        assert service.desk.figures.answers.labels("failed")._value.get() == 2


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_stream_that_fails_ends_as_a_stream(peers, start_peer, status):
    broken = start_peer("/retrieve", lambda body: status)
    with agent_service(peers[0].url, broken.url, deadline_s=1) as service, client_of(service) as client:
        chunks = asking(client, QUESTION, stream=True)
        assert next(chunks).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError, match=r"failed|answered HTTP"):
            list(chunks)
        check_failed_stream(service)


def test_a_stream_that_fails_after_a_sign_of_life_ends_as_a_stream(slow, monkeypatch):
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.2)
    with agent_service(*slow, deadline_s=0.5) as service:
        check_failed_stream(service)


def check_failed_stream(service):
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    text = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30).text
    *_, error, last, done, end = text.split("\n\n")
    assert json.loads(error[6:])["error"]["type"] == "server_error"
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "stop"
    assert (done, end) == ("data: [DONE]", "")
