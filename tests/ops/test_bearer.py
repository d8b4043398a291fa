"""Bearer tokens of services: from the environment, on requests, and shown nowhere."""

import asyncio
import dataclasses
import pickle
from urllib.parse import urlsplit

import pytest
from fastapi.responses import JSONResponse, RedirectResponse

from drzero.cli import main
from drzero.ops.bearer import MODEL_KEY, TokenUnusable, bearer_headers, bearer_of
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.conversations import served_agent
from drzero.stages.models import StageModel, completions_url, stage_model
from drzero.stages.services import solver_spec
from verl_ext.clients.search_agent import SearchAgent
from verl_ext.clients.served_model import ServedModel, ServerUnavailable, SolverServerError
from verl_ext.sglang.serve import Hidden

KEY, ANOTHER = "planted-openai-c840", "planted-another-1f7e"


@pytest.mark.parametrize(("value", "headers"), [("", {}), (" k \n", {"Authorization": "Bearer k"})])
def test_a_request_carries_the_token_of_the_environment(monkeypatch, value, headers):
    monkeypatch.setenv(MODEL_KEY, value)
    assert bearer_headers(MODEL_KEY) == headers


def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv(MODEL_KEY, "geheim\nö")
    with pytest.raises(TokenUnusable, match="OPENAI_API_KEY holds characters") as refused:
        bearer_of(MODEL_KEY)
    assert "geheim" not in str(refused.value)


# --- which server gets which key ----------------------------------------------------------------------------

STOPS = {"choices": [{"text": "x", "finish_reason": "stop"}]}
REPLIES = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
MODELS = {"/v1/models": {"data": [{"id": "served-model"}]}}


@pytest.fixture
def two_keys(monkeypatch):
    monkeypatch.setenv(MODEL_KEY, KEY)
    monkeypatch.setenv("ANOTHER_KEY", ANOTHER)


@pytest.mark.usefixtures("two_keys")
@pytest.mark.parametrize(
    ("chosen", "key"), [([], KEY), (["endpoint_key=ANOTHER_KEY"], ANOTHER)], ids=["default", "named"]
)
def test_an_endpoint_gets_the_key_that_is_named_for_it_and_is_told_to(
    start_peer, tiny_model, capsys, chosen, key
):
    ids = start_peer("/v1/completions", lambda _: STOPS, MODELS)
    config = compose_stage(
        "evaluate", ["hardware=cpu", f"endpoint={ids.url}/v1", f"tokenizer={tiny_model}", *chosen]
    )
    served = stage_model(config, "solver")
    ask(ServedModel(served.url, served.name, served.tokenizer, key_variable=served.key_variable))
    messages = start_peer("/v1/chat/completions", lambda _: REPLIES, MODELS)
    config.endpoint, config.api = f"{messages.url}/v1", "chat"
    endpoint = stage_model(config, "solver").endpoint
    assert endpoint is not None
    asyncio.run(endpoint.ask({"messages": []}))
    assert len(ids.requests) == len(messages.requests) == 1
    assert ids.keys == messages.keys == {f"Bearer {key}"}
    said = capsys.readouterr().out
    assert f"carry the key in {config.endpoint_key}" in said and KEY not in said and ANOTHER not in said


@pytest.mark.usefixtures("two_keys")
def test_a_model_server_of_a_runs_own_gets_its_key_whatever_the_endpoints_is(start_peer, smollm2_tokenizer):
    own = start_peer("/v1/completions", lambda _: STOPS)
    overrides = ["hardware=cpu", "endpoint=https://api.example.com/v1", "endpoint_key=ANOTHER_KEY"]
    config = resolve(compose_stage("synthesize", overrides))
    config.solver.port = urlsplit(own.url).port

    async def play() -> None:
        model = StageModel("solver", "", "", completions_url(config), smollm2_tokenizer)
        async with served_agent(SearchAgent, config, model) as agent:
            await agent.complete([1], max_tokens=1)

    asyncio.run(play())
    assert own.keys == {f"Bearer {KEY}"}


@pytest.mark.usefixtures("two_keys")
def test_no_server_gets_a_key_that_it_is_not_said_to_get(start_peer, smollm2_tokenizer):
    peer = start_peer("/v1/completions", lambda _: STOPS)
    ask(ServedModel(f"{peer.url}/v1/completions", "a-model", smollm2_tokenizer))
    assert peer.keys == {None}


@pytest.mark.usefixtures("two_keys")
def test_a_redirect_takes_no_key_to_another_server(start_peer, smollm2_tokenizer):
    other = start_peer("/v1/completions", lambda _: STOPS)
    moved = RedirectResponse(f"{other.url}/v1/completions", status_code=307)
    peer = start_peer("/v1/completions", lambda _: moved)
    with pytest.raises(SolverServerError, match="HTTP 307"):
        ask(ServedModel(f"{peer.url}/v1/completions", "a", smollm2_tokenizer, key_variable=MODEL_KEY))
    assert peer.keys == {f"Bearer {KEY}"} and other.keys == set()


@pytest.mark.usefixtures("two_keys")
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, r"OPENAI_API_KEY is not accepted.*endpoint_key="),
        *[(status, r"asked with \*\*\*") for status in (200, 400, 429, 503)],
    ],
)
def test_a_key_that_a_server_repeats_is_in_no_error(start_peer, smollm2_tokenizer, status, said):
    repeats = JSONResponse({"error": f"Too much is asked with {KEY}"}, status_code=status)
    peer = start_peer("/v1/completions", lambda _: repeats)
    url, key = f"{peer.url}/v1/completions", MODEL_KEY
    with pytest.raises((SolverServerError, ServerUnavailable), match=said) as failed:
        ask(ServedModel(url, "a", smollm2_tokenizer, key_variable=key, retries=0))
    assert KEY not in str(failed.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [("geheim\nö", "ANOTHER_KEY holds characters"), ("", "ANOTHER_KEY should hold the endpoint's key")],
)
def test_an_endpoints_key_that_cannot_be_sent_or_is_missing_is_one_error_before_any_request(
    monkeypatch, start_peer, capsys, value, said
):
    monkeypatch.setenv("ANOTHER_KEY", value)
    peer = start_peer("/v1/completions", lambda _: STOPS, MODELS)
    named = [f"endpoint={peer.url}/v1", "endpoint_key=ANOTHER_KEY", "tokenizer=x", "env=wordle"]
    assert main(["evaluate", "hardware=cpu", *named]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "geheim" not in shown.err + shown.out
    assert peer.keys == set()


def ask(model: ServedModel) -> None:
    async def complete() -> None:
        try:
            await model.complete([1], max_tokens=1)
        finally:
            await model.aclose()

    asyncio.run(complete())


# --- what shows it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sglang", "vllm", "reference"])
def test_no_command_line_has_it(monkeypatch, engine):
    # SGLang's own flag would show it, so our server reads the environment instead.
    config = resolve(compose_stage("evaluate", ["hardware=8xh100", f"solver.engine={engine}"]))
    plain = solver_spec(config).command
    monkeypatch.setenv(MODEL_KEY, KEY)
    spec = solver_spec(config)
    command = spec.command
    assert (spec.env.get("VLLM_API_KEY") == KEY) == (engine == "vllm")
    assert KEY not in " ".join(command)
    assert (command[2] == "verl_ext.sglang.serve") == (engine == "sglang")
    assert command[3:] == plain[3:]


def test_sglangs_arguments_do_not_show_it_and_its_processes_get_it():
    @dataclasses.dataclass
    class Arguments:
        api_key: str

    arguments = Arguments(Hidden(KEY))
    assert KEY not in f"{arguments=}"
    assert (
        pickle.loads(pickle.dumps(arguments.api_key)) == KEY
        and f"Bearer {arguments.api_key}" == f"Bearer {KEY}"
    )
