"""The same questions through every door get the answers that evaluate gives, token for token.

DRZERO_QUESTIONS=100 python -m pytest tests/agent/test_doors.py -m slow      # more than the 16 of a plain run
"""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest
from mcp import Client

from drzero.ops.process.ports import free_port

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.slow("real engines on two cores; test_chat, test_page and test_mcp cover the doors"),
    pytest.mark.timeout(3600),
]

QUESTIONS = int(os.environ.get("DRZERO_QUESTIONS", "16"))
# One at a time: a batch of another size rounds otherwise, and a near tie falls to another token.
MODEL = ["hardware=cpu", "model=demo-policy", "solver.concurrency=1"]


def drzero(folder, *words, **options):
    command = [sys.executable, "-m", "drzero.cli", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=1800, **options
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    drzero(folder, "demo-data")
    asked = ["iteration=0", "hops=[1,2]", f"questions_per_benchmark={QUESTIONS // 2}"]
    drzero(folder, "evaluate", *MODEL, *asked)
    lines = (folder / "outputs/checkpoints/evaluate_iter0/answers.jsonl").read_text().splitlines()
    records = [record for line in lines if "question" in (record := json.loads(line))]
    assert len(records) == QUESTIONS
    return folder, {record["question"]: record for record in records}


@contextmanager
def served(folder, *words):
    port = free_port(None)
    with (folder / "serve.log").open("w") as log:
        serve = ["serve-agent", f"port={port}", "sources_in_text=false", *words]
        command = [sys.executable, "-m", "drzero.cli", *serve]
        child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            assert child.poll() is None, (folder / "serve.log").read_text()
        yield url
    finally:
        child.terminate()
        assert child.wait(60) is not None
        assert not [one for one in psutil.Process().children(recursive=True) if one.pid == child.pid]


def is_up(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_every_door_gives_what_evaluate_gives(world):
    folder, records = world
    expected = {question: (one["answer"], one["tokens_out"]) for question, one in records.items()}
    questions = list(records)
    with served(folder, *MODEL) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        (model,) = client.models.list().data

        def whole(question):
            messages = [{"role": "user", "content": question}]
            completion = client.chat.completions.create(model=model.id, messages=messages)
            return bare(completion.choices[0].message.content), completion.usage.completion_tokens

        def streamed(question):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            messages = [{"role": "user", "content": question}]
            *chunks, last = client.chat.completions.create(model=model.id, messages=messages, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return bare(text), last.usage.completion_tokens

        def on_the_page(question):
            with httpx.stream("POST", f"{url}/ask", json={"question": question}, timeout=600) as response:
                events = [
                    json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
                ]
            return events[-1]["answer"]["answer"], events[-1]["answer"]["tokens_out"]

        for door in (whole, streamed, on_the_page):
            assert {question: door(question) for question in questions} == expected
        by_mcp = asyncio.run(asked_by_mcp(f"{url}/mcp", questions))
        assert by_mcp == {question: answer for question, (answer, _) in expected.items()}


async def asked_by_mcp(url, questions):
    async with Client(url) as client:
        return {
            question: (await client.call_tool("ask", {"question": question})).structured_content["answer"]
            for question in questions
        }


def bare(text):
    """The answer without the service's remark below it."""
    return None if text.startswith("*The agent gave no answer") else text.split("\n\n*")[0]
