"""`drzero serve-agent` as a command: a real retrieval service, and an endpoint with a script."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import openai
import psutil
import pytest
from scripted_endpoint import KEY, MODEL, agent_words, scripted_endpoint

QUESTION = "On which river does the town of Velmar lie?"
SENTENCE = "Velmar is a town of weavers that lies on the river Sendra."
TOKEN = "planted-0123456789"


@pytest.fixture
def start(towns, tmp_path):
    started = []

    def run(url, *words, **environ):
        given = [*agent_words(url, tmp_path), f"retrieval.url={towns}", *words]
        command = [sys.executable, "-m", "drzero.cli", "serve-agent", *given]
        environ = {**os.environ, "OPENAI_API_KEY": KEY, "PYTHONPATH": os.getcwd(), **environ}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=tmp_path
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def address_of(process):
    """The line to copy. Ends the test if the command ends before it."""
    for line in process.stdout:
        if found := re.fullmatch(r"export OPENAI_BASE_URL=(\S+)\n", line):
            return found[1]
    raise AssertionError(process.wait())


def ended(process, number):
    process.send_signal(number)
    return process.communicate(timeout=30)[0], process.returncode


def test_the_served_agent_searches_answers_and_ends_as_asked(start):
    with scripted_endpoint() as endpoint:
        process = start(endpoint.url, "port=null")
        url = address_of(process)
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            (model,) = client.models.list()
            messages = [{"role": "user", "content": QUESTION}]
            completion = client.chat.completions.create(model=model.id, messages=messages)
        message = completion.choices[0].message
        cited, *_ = message.annotations
        link = cited.url_citation.url
        assert completion.usage.completion_tokens == 40  # of two turns
        assert message.content.startswith("Sendra\n") and SENTENCE in httpx.get(link).text
        health = httpx.get(url.replace("/v1", "/health"))
        assert (health.status_code, health.json()) == (200, {"status": "ok", "retrieval": "healthy"})
        said, code = ended(process, signal.SIGTERM)
    assert code == 143 and "Traceback" not in said
    with pytest.raises(httpx.ConnectError):
        httpx.get(link)


def test_a_compared_model_is_the_second_one_and_ctrl_c_ends_it(start):
    with scripted_endpoint() as endpoint:
        process = start(endpoint.url, "port=null", "--compare", "solver.max_turns=1")
        with openai.OpenAI(base_url=address_of(process), api_key="any", max_retries=0) as client:
            names = [model.id for model in client.models.list()]
            assert names == [MODEL, f"{MODEL}-compared"]
            messages = [{"role": "user", "content": QUESTION}]
            first, second = (client.chat.completions.create(model=name, messages=messages) for name in names)
        said, code = ended(process, signal.SIGINT)
    assert first.choices[0].message.content.startswith("Sendra")
    assert second.choices[0].message.content == "*The agent gave no answer.*"
    assert code == 130 and "Traceback" not in said


def test_a_service_that_dies_ends_it(start, towns_index):
    with scripted_endpoint() as endpoint:
        own = [f"chroma.path={towns_index}", "retrieval.url=null", "retrieval.restarts=0"]
        process = start(endpoint.url, "port=null", *own, "retrieval.port=null")
        url = address_of(process)
        (retrieval,) = psutil.Process(process.pid).children()
        retrieval.kill()
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "service 'retrieval' died" in said and "Traceback" not in said
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_taken_port_is_one_line_before_anything_starts(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start("http://127.0.0.1:9/v1", f"port={other.getsockname()[1]}")
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and said.count("\n") == 1 and "is taken by" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["host=0.0.0.0"], "set AGENT_TOKEN"),
        (["host=192.0.2.1"], "nothing can listen at 192.0.2.1"),
        (["port=80"], "port"),
        (["--stdin"], "--stdin"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(start, words, told):
    with scripted_endpoint() as endpoint:
        process = start(endpoint.url, "port=null", *words)
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and told in said and "Traceback" not in said


def test_a_token_in_dotenv_lets_in_and_reaches_no_file(start, tmp_path):
    (tmp_path / ".env").write_text(f"AGENT_TOKEN={TOKEN}\n")
    with scripted_endpoint() as endpoint:
        process = start(endpoint.url, "port=null", "host=0.0.0.0")
        url = address_of(process)
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/models").status_code == 401
        assert httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        said, _ = ended(process, signal.SIGTERM)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".env"]
    assert TOKEN not in said and not any(TOKEN.encode() in content for content in written)
