"""A real SGLang server of the pinned version on a CPU answers solver attempts."""

import asyncio
import subprocess

import httpx
import pytest
from sglang_server import serving
from transformers import AutoTokenizer

from drzero.launch.image.pins import GPU_PINS
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import solver_spec
from search.client import Passage
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

CONTEXT = 1024
ATTEMPTS = 32  # they sample freely: most search or answer, none must
pytestmark = pytest.mark.slow("starts SGLang")


class Passages:
    """A search service with one passage."""

    async def retrieve(self, queries, topk=None):
        return [[Passage(title="Oldham", text="Vell came.", contents="Oldham\nVell came.")] for _ in queries]


@pytest.fixture(scope="module")
def tokenizer(speaking_model):
    return AutoTokenizer.from_pretrained(speaking_model)


@pytest.fixture(scope="module")
def server(sglang_python, speaking_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "sglang.log"
    with serving(sglang_python, speaking_model, log, CONTEXT, sequences=16) as url:
        yield url


def agent(server, tokenizer, **settings):
    defaults = {"topk": 1, "max_tokens_per_turn": 64, "max_context_tokens": CONTEXT, "prompt_form": "short"}
    return SolverAgent(
        f"{server}/v1/completions", "solver", tokenizer, Passages(), **(defaults | settings), retries=0
    )


def prompts(tokenizer):
    asked = ("Who came?", "Where did Vell come from?", "What flows through Oldham?")
    return [
        render_prompt_ids(tokenizer, solver_messages(question, "short"), [SEARCH_TOOL_SCHEMA])
        for question in asked
    ]


def test_versions_are_the_images(sglang_python):
    script = "from importlib.metadata import version as v; print(v('sglang'), v('transformers'))"
    command = [sglang_python, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [GPU_PINS["sglang"], GPU_PINS["transformers"]]


def test_attempts_search_and_answer_over_several_turns(server, tokenizer):
    async def play():
        solver = agent(server, tokenizer)
        try:
            return await solver.attempts("Who came?", n=ATTEMPTS)
        finally:
            await solver.aclose()

    attempts = asyncio.run(play())
    assert [attempt.failure for attempt in attempts] == [None] * ATTEMPTS
    assert any(attempt.searches and len(attempt.trajectory.turns) > 1 for attempt in attempts)
    assert {"Vell", "nobody"} & {attempt.answer for attempt in attempts}


def test_a_turn_has_its_end_token_and_the_sampled_ids(server, tokenizer):
    async def complete(prompt):
        solver = agent(server, tokenizer, temperature=0.0)
        try:
            return await solver.complete(prompt, 48, seed=None)
        finally:
            await solver.aclose()

    for prompt in prompts(tokenizer):
        sampling = {"max_new_tokens": 48, "temperature": 0, "stop_token_ids": [tokenizer.eos_token_id]}
        native = httpx.post(
            f"{server}/generate", json={"input_ids": prompt, "sampling_params": sampling}, trust_env=False
        ).json()
        completion = asyncio.run(complete(prompt))
        assert completion.ids == native["output_ids"]
        assert not completion.truncated and completion.ids[-1] == tokenizer.eos_token_id


def test_a_prompt_beyond_the_context_is_a_configuration_error(server, tokenizer):
    async def ask():
        solver = agent(server, tokenizer, max_context_tokens=8 * CONTEXT, prompt_form="full")
        try:
            await solver.complete([5] * (2 * CONTEXT), 8, seed=None)
        finally:
            await solver.aclose()

    with pytest.raises(SolverServerError, match=r"HTTP 400.*context length"):
        asyncio.run(ask())


def test_its_metrics_count_tokens_for_the_liveness_check(server):
    config = resolve(compose_stage("challenger", ["hardware=8xh100", "solver.port=8001"]))
    liveness = solver_spec(config).liveness
    assert liveness
    (name,) = liveness.work
    metrics = httpx.get(f"{server}/metrics", follow_redirects=True, trust_env=False).text
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"{name}{{"))
    assert float(line.rpartition(" ")[2]) > 0
