"""`drzero ask` as a command: a child process, a real retrieval service, and an endpoint with a script."""

import json
import os
import re
import subprocess
import sys

import pytest
from scripted_endpoint import KEY, MODEL, agent_words, scripted_endpoint

from drzero.agent.ask import run_ask
from drzero.ops.errors import UserError
from search.index_info import ask_index

QUESTION = "On which river does the town of Velmar lie?"
SENTENCE = "Velmar is a town of weavers that lies on the river Sendra."


@pytest.fixture
def ask(towns, tmp_path):
    def run(url, *words, typed=""):
        given = [*agent_words(url, tmp_path), f"retrieval.url={towns}", *words]
        command = [sys.executable, "-m", "drzero.cli", "ask", *given]
        environ = {**os.environ, "OPENAI_API_KEY": KEY}
        return subprocess.run(command, input=typed, capture_output=True, text=True, env=environ, check=False)

    return run


@pytest.fixture
def fixed_endpoint(start_peer):
    # An endpoint that says the same to everything but the search it is granted first.

    def start(said):
        def complete(body):
            message = {"role": "assistant", "content": said}
            if body["messages"][-1]["role"] != "tool":
                call = {"name": "search", "arguments": json.dumps({"query_list": ["Velmar"]})}
                message["tool_calls"] = [{"id": "a", "type": "function", "function": call}]
            return {"choices": [{"message": message, "finish_reason": "stop"}]}

        return start_peer("/v1/chat/completions", complete).url + "/v1"

    return start


def test_searches_answer_and_evidence_are_shown(ask):
    with scripted_endpoint() as endpoint:
        ran = ask(endpoint.url, QUESTION)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout[ran.stdout.index("  searching:") :].splitlines()
    assert shown[0] == "  searching: Velmar" and shown[1].startswith("  found: Velmar, ")
    assert shown[2:5] == ["Sendra", "  [1] Velmar (Velmar)", f"      {SENTENCE}"]


def test_json_is_all_that_stdout_has(ask, towns):
    with scripted_endpoint() as endpoint:
        ran = ask(endpoint.url, "--json", QUESTION)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert (record["question"], record["answer"], record["state"]) == (QUESTION, "Sendra", "supported")
    assert record["searches"] == ["Velmar"] and record["tokens_out"] == 40
    assert record["model"] == f"{MODEL} at {endpoint.url}"
    assert record["index"] == ask_index(towns).fingerprint
    first = record["sources"][0]
    assert (first["id"], first["title"], first["query"]) == ("Velmar", "Velmar", "Velmar")
    assert first["evidence"] == first["text"] == SENTENCE
    assert [one["id"] for one in record["sources"] if one["evidence"]] == ["Velmar", "Sendra"]
    assert "[endpoint] asking" in ran.stderr


def test_without_a_question_it_keeps_asking_and_remembers(ask):
    with scripted_endpoint() as endpoint:
        ran = ask(endpoint.url, "--json", typed=f"{QUESTION}\n\n  And who founded it?\n")
    assert ran.returncode == 0, ran.stderr
    first, second = map(json.loads, ran.stdout.splitlines())
    assert (first["question"], second["question"]) == (QUESTION, "And who founded it?")
    said = endpoint.requests[-1]["messages"][1]["content"]
    assert f"Asked before, with its answer:\n{QUESTION} Sendra\nNow answer:\nAnd who founded it?" in said


def test_two_agents_are_compared_by_what_each_was_given(ask):
    with scripted_endpoint() as endpoint:
        ran = ask(endpoint.url, "--json", "--compare", "retrieval.topk=1", "retrieval.topk=3", QUESTION)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert (len(record["sources"]), len(record["compared"]["sources"])) == (3, 1)
    assert record["compared"]["answer"] == "Sendra"


@pytest.mark.parametrize(
    ("said", "code", "shown"),
    [
        ("<answer>Atlantis</answer>", 0, "No passage it read contains this answer."),
        ("I do not know.", 3, "The agent gave no answer."),
        ("<answer>\x1b[2JSendra</answer>", 0, "\\x1b[2JSendra"),
    ],
)
def test_what_the_answer_is_worth_is_said(ask, fixed_endpoint, said, code, shown):
    ran = ask(fixed_endpoint(said), QUESTION)
    assert (ran.returncode, ran.stderr) == (code, "")
    assert shown in ran.stdout and "\x1b" not in ran.stdout


def test_a_service_that_fails_is_said_and_the_code_is_one(ask):
    with scripted_endpoint(refuse_from=2, refusal=503) as endpoint:
        ran = ask(endpoint.url, "--json", "solver.deadline_s=3", QUESTION)
        record = json.loads(ran.stdout)
        assert (ran.returncode, record["state"], record["answer"]) == (1, "failed", None)
        assert record["failure"]
    with scripted_endpoint(refuse_from=1, refusal=401) as endpoint:
        ran = ask(endpoint.url, QUESTION)
    assert ran.returncode == 2 and endpoint.url in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Who", "founded", "Orrin?"], "one question at a time, in quotes: 'Who founded Orrin?'"),
        (["--jsn", "Who?"], "no option --jsn (did you mean '--json'?)"),
        (["--compare", "Who?"], "--compare takes what names the other agent"),
        (["--compare"], "--compare takes what names the other agent"),
        ([], "no trained solver"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(tmp_path, words, message):
    model = ["model=demo-policy"] if words else []
    with pytest.raises(UserError, match=re.escape(message)):
        run_ask([f"paths.checkpoints={tmp_path}", "hardware=cpu", *model, *words])
