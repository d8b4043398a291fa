"""The solver server as a process over HTTP, and the engine on the 135M model."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
from anthropic import Anthropic
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from tiny_model import save_tiny_model
from transformers import LlamaForCausalLM

from drzero.ops.bearer import MODEL_KEY, bearer_headers
from verl_ext.engine.api_server import create_app, main
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import ModelLoadError, load_model

MAX_SEQ_LEN = 3000
COMMAND = [sys.executable, "-m", "verl_ext.engine.api_server"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model_folder(smollm2_tokenizer, tmp_path_factory):
    spread = {"initializer_range": 0.2, "tie_word_embeddings": False}
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=smollm2_tokenizer, **spread)


@pytest.fixture(scope="module")
def server(model_folder):
    arguments = ["--model", str(model_folder), "--port", "0", "--max-seq-len", str(MAX_SEQ_LEN)]
    arguments += ["--served-model-name", "tiny", "--max-batch-size", "4"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
    with httpx.Client(base_url=address, timeout=60, transport=httpx.HTTPTransport(retries=5)) as client:
        yield client
    process.terminate()
    assert process.wait(30) in (0, -signal.SIGTERM)  # uvicorn shuts down, then ends by its signal


def complete(server, **fields):
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, **fields}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def post(server, body):
    """Send a body that httpx's own JSON encoder would refuse."""
    return server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})


def metric(server, name):
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_token_ids_are_completed_as_by_the_model(server, model_folder):
    answer = complete(server, return_token_ids=True, logprobs=2, return_tokens_as_token_ids=True)
    choice = answer["choices"][0]
    model = LlamaForCausalLM.from_pretrained(model_folder).eval()
    ids = torch.tensor([[5, 6, 7, 8, *choice["token_ids"]]])
    with torch.no_grad():
        best = model(ids).logits[0, 3:-1].log_softmax(-1).topk(2)
    assert choice["token_ids"] == best.indices[:, 0].tolist()
    written = choice["logprobs"]
    assert written["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert written["token_logprobs"] == pytest.approx(best.values[:, 0].tolist(), abs=1e-4)
    pairs = zip(best.indices[0].tolist(), best.values[0].tolist(), strict=True)
    expected = {f"token_id:{token}": log_prob for token, log_prob in pairs}
    assert written["top_logprobs"][0] == pytest.approx(expected, abs=1e-4)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_a_text_prompt_equals_its_token_ids(server, smollm2_tokenizer):
    as_text = complete(server, prompt="The capital of France")
    as_ids = complete(server, prompt=smollm2_tokenizer.encode("The capital of France"))
    assert as_text["choices"] == as_ids["choices"] and "token_ids" not in as_text["choices"][0]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_the_response(server, keep):
    free = complete(server)["choices"][0]["text"]
    stop = free[8:11]
    choice = complete(server, stop=stop, no_stop_trim=keep)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert free.startswith(choice["text"])
    assert (stop in choice["text"]) == keep


def test_a_stop_token_is_in_the_ids_only(server, smollm2_tokenizer):
    free = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    choice = complete(server, stop_token_ids=[free[5]], return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == free[: free.index(free[5]) + 1]
    assert choice["text"] == smollm2_tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=True)


REFUSED = [({"prompt": [1] * MAX_SEQ_LEN}, str(MAX_SEQ_LEN)), ({"prompt": [10**6]}, "vocabulary")]
REFUSED += [({"prompt": [2**63]}, "vocabulary"), ({"prompt": "\ud800"}, "hex escape"), ({"n": 0}, "n")]
REFUSED += [({"stop": "\ud800"}, "hex escape"), ({"best_of": 3}, "best_of"), ({"logprobs": 21}, "logprobs")]
REFUSED += [({"temperature": -1}, "temperature"), ({"temperature": 1e-45}, "temperature")]
REFUSED += [({"presence_penalty": 0.5}, "presence_penalty"), ({"top_k": 2**70}, "top_k")]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_unsupported_options_are_refused_by_name(server, fields, named):
    response = post(server, json.dumps({"prompt": [1], **fields}))
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"prompt": [1], "x": ' + b"[" * 100_000])
def test_a_body_that_is_not_a_request_is_refused(server, body):
    response = post(server, body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_far_too_long_body_is_refused_before_it_is_read(server):
    response = server.post("/v1/completions", json={"prompt": "long " * 2_000_000})
    assert response.status_code == 413 and "the body is longer than" in response.text


def test_a_far_too_long_head_is_refused(server):
    assert server.get("/v1/models", headers={"X": "x" * 100_000}).status_code == 431


small = st.integers(-2, 5)
odd = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(), max_size=20)  # lone surrogates too
    | st.lists(small | st.text(st.characters(), max_size=3), max_size=4)
)
requests = st.fixed_dictionaries(
    {"prompt": st.text(max_size=30) | st.lists(small | st.integers(), max_size=20) | odd},
    optional={
        **dict.fromkeys(("seed", "logprobs", "echo", "skip_special_tokens", "other"), odd),
        "max_tokens": small,
        "temperature": st.floats(0, 2) | odd,
        "top_p": st.floats(0, 1) | odd,
        "top_k": small | odd,
        "stop": st.text(max_size=3) | odd,
        "stop_token_ids": st.lists(st.integers()) | odd,
    },
)


@settings(max_examples=60)
@given(requests)
def test_after_any_request_the_engine_answers_the_next(server, fields):
    response = post(server, json.dumps(fields))
    assert response.status_code in (200, 400), response.text
    assert complete(server, max_tokens=2)["usage"]["completion_tokens"] == 2


BROKEN_LOOP = """
import sys
from torch.nn.modules.module import register_module_forward_hook
from drzero.ops.bearer import MODEL_KEY, bearer_headers
from verl_ext.engine.api_server import create_app, main
register_module_forward_hook(lambda *_: sys.exit("the loop is lost"))
main()
"""


@pytest.mark.slow("a separate server; `test_engine_generation.py` ends an engine in process")
def test_a_crashed_engine_ends_its_process_with_the_cause(model_folder):
    command = [sys.executable, "-c", BROKEN_LOOP, "--model", str(model_folder), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
        with httpx.Client(base_url=address, timeout=60, transport=httpx.HTTPTransport(retries=5)) as client:
            assert client.get("/health").status_code == 503
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "the engine's loop has ended: SystemExit('the loop is lost')" in errors


def test_health_models_and_metrics_answer(server):
    assert server.get("/health").status_code == 200
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["tiny"]
    names = ("engine_requests_total", "engine_generated_tokens_total")
    before = [metric(server, name) for name in names]
    complete(server, max_tokens=7)
    assert [metric(server, name) - old for name, old in zip(names, before, strict=True)] == [1, 7]


def test_a_client_that_disconnects_frees_its_slot(server):
    generated = metric(server, "engine_generated_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        complete_body = {"prompt": [9], "max_tokens": MAX_SEQ_LEN, "temperature": 1}
        server.post("/v1/completions", json=complete_body, timeout=0.3)
    deadline = time.monotonic() + 60
    while metric(server, "engine_batch_size") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(server, "engine_generated_tokens_total") - generated < MAX_SEQ_LEN - 1


def test_a_client_that_leaves_during_its_request_is_no_error(model_folder, smollm2_tokenizer):
    model, _ = load_model(str(model_folder))
    engine = ReferenceEngine(model, eos_token_ids=[2], max_seq_len=64)
    parts = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]
    parts += [{"type": "http.disconnect"}]
    sent = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    try:
        asyncio.run(create_app(engine, smollm2_tokenizer, "tiny")(scope, receive, send))
    finally:
        engine.close()
    assert sent[0]["status"] == 499


def test_a_taken_port_is_one_line_and_status_2(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as exit_info:
            main(["--model", "nowhere", "--port", port])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert port in message
    assert len(message.strip().splitlines()) == 1


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=tmp_path.name):
        load_model(str(tmp_path))


def test_requests_need_the_key_and_health_does_not(model_folder, monkeypatch, smollm2_tokenizer):
    monkeypatch.setenv(MODEL_KEY, "planted-openai-c840")
    model, _ = load_model(str(model_folder), dtype="float32", device="cpu")
    engine = ReferenceEngine(model, eos_token_ids=(2,), max_batch_size=2, max_seq_len=64, seed=0)
    with TestClient(create_app(engine, smollm2_tokenizer, "tiny")) as client:
        body = {"prompt": [5, 6], "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer other"}):
            refused = client.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 401
            assert "OPENAI_API_KEY" in refused.text and "planted" not in refused.text
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.post("/v1/completions", json=body, headers=bearer_headers(MODEL_KEY)).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200


def by_responses(url, **more):
    items = [{"role": "user", "content": "One town:"}]
    answer = OpenAI(base_url=f"{url}/v1", api_key="x").responses.create(model="tiny", input=items, **more)
    if more["stream"]:
        answer = [event for event in answer][-1].response
    return answer.output_text, answer.usage.output_tokens, answer.status


def by_messages(url, **more):
    said = {"model": "tiny", "messages": [{"role": "user", "content": "One town:"}]}
    client = Anthropic(base_url=url, api_key="x")
    said |= {"max_tokens": more["max_output_tokens"], "extra_body": {"temperature": more["temperature"]}}
    if more["stream"]:
        with client.messages.stream(**said) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**said)
    text = "".join(block.text for block in answer.content)
    ended = {"max_tokens": "incomplete", "end_turn": "completed"}[answer.stop_reason]
    return text, answer.usage.output_tokens, ended


@pytest.mark.parametrize("ask", [by_responses, by_messages])
def test_other_apis_give_the_same_turn_as_a_chat(ask, server):
    url = str(server.base_url).rstrip("/")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "One town:"}], "max_tokens": 9}
    chat = server.post("/v1/chat/completions", json={**asked, "temperature": 0}).json()
    choice, tokens = chat["choices"][0], chat["usage"]["completion_tokens"]
    ended = {"length": "incomplete", "stop": "completed"}[choice["finish_reason"]]
    for stream in (False, True):
        told = ask(url, max_output_tokens=9, stream=stream, temperature=0)
        assert told == (choice["message"]["content"], tokens, ended)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("responses", {"input": "hi", "previous_response_id": "x"}, "send the whole conversation"),
        ("responses", {"input": [{"type": "web_search_call"}]}, "type 'web_search_call'"),
        ("responses", {"input": "hi", "model": "other"}, "'other' does not exist here"),
        ("responses", {"input": "hi", "stream": True, "model": "other"}, "'other' does not exist here"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        ("messages", {"messages": [{"role": "user", "content": "x " * 4000}]}, "maximum context length"),
    ],
)
def test_other_apis_refuse_in_their_own_words(path, body, said, server):
    response = server.post(f"/v1/{path}", json=body)
    assert response.status_code in (400, 404) and said in response.json()["error"]["message"]
    assert (response.json().get("type") == "error") is (path == "messages")
