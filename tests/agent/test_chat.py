"""OpenAI's own client against the service, with a scripted model and search."""

import openai
import pytest
from agent_service import ANSWERS, SENTENCE, agent_service, passages, script

QUESTION = "Where does Velmar lie?"


@pytest.fixture
def peers(start_peer):
    return start_peer("/v1/chat/completions", script), start_peer("/retrieve", passages)


@pytest.fixture
def service(peers):
    with agent_service(*(peer.url for peer in peers), sides=2, lists_sources=True) as running:
        yield running


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def asking(client, *said, **options):
    """Ask in a conversation of user and assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return client.chat.completions.create(**{"model": "side-0", "messages": messages} | options)


def test_an_answer_comes_with_its_sources_in_the_text_and_as_annotations(client, service):
    completion = asking(client, QUESTION)
    message, usage = completion.choices[0].message, completion.usage
    assert message.content.split("\n\n")[0] == ANSWERS[QUESTION]
    (annotation,) = message.annotations
    cited = annotation.url_citation
    assert (cited.title, cited.url) == ("Velmar", f"{service.url}/sources/velmar")
    assert message.content[cited.start_index : cited.end_index] == f"[Velmar]({cited.url})"
    assert SENTENCE in message.content
    assert completion.choices[0].finish_reason == "stop" and completion.model == "side-0"
    assert service.desk.index in completion.system_fingerprint
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_searches_stream_as_thoughts_and_the_stream_ends_as_openais(client):
    chunks = list(asking(client, QUESTION, stream=True, stream_options={"include_usage": True}))
    *said, last, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in said]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    thoughts = "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas)
    assert thoughts.startswith(f"Searching: {QUESTION}\n\nFound: Velmar, ")
    assert "".join(delta.content or "" for delta in deltas).startswith(ANSWERS[QUESTION])
    assert [chunk.choices[0].finish_reason for chunk in [*said, last]] == [None] * len(said) + ["stop"]
    assert last.choices[0].delta.model_dump(exclude_none=True) == {}
    assert usage.choices == [] and usage.usage.total_tokens >= 0
