"""A real SGLang server of the pinned version, on a CPU, answering what solver attempts ask.

It is started by the command and the environment of a stage with `hardware=cpu rollout=sglang`.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.image.pins import GPU_PINS
from ops.process.ports import reserve_port
from pipeline.compose import compose_stage, resolve
from pipeline.stages.services import solver_spec
from search.client import Passage
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_agent import SolverServerError
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA
from verl_ext.method.solver_agent import SolverAgent

CONTEXT = 1024
STARTS_WITHIN_S = 600
pytestmark = pytest.mark.slow("starts SGLang")


class Passages:
    """A search service with one passage."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Passage]]:
        return [[Passage(title="Oldham", text="Vell came.", contents="Oldham\nVell came.")] for _ in queries]


@pytest.fixture(scope="module")
def tokenizer(speaking_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(speaking_model)


@pytest.fixture(scope="module")
def server(
    sglang_python: str, speaking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of the server."""
    config = resolve(
        compose_stage(
            "challenger",
            [
                *("hardware=cpu", "rollout=sglang", f"solver.model_path={speaking_model}"),
                *("solver.dtype=float32", "solver.max_batch_size=16"),
                *(f"solver.max_context_tokens={CONTEXT}", f"solver.port={reserve_port(None)}"),
            ],
        )
    )
    spec = solver_spec(config)
    assert spec.command[1:3] == ("-m", "sglang.launch_server")
    log = tmp_path_factory.mktemp("logs") / "sglang.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sglang_python, *spec.command[1:]],
            env={**os.environ, **spec.env, "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(process, spec.health_url, log)
        yield spec.health_url.removesuffix("/health")
    finally:
        # On SIGTERM SGLang waits for requests whose clients are gone.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if httpx.get(url, timeout=30, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail(f"SGLang did not come up:\n{log.read_text(errors='replace')[-3000:]}")


def agent(server: str, tokenizer: Any, **settings: Any) -> SolverAgent:
    defaults = {"topk": 1, "max_tokens_per_turn": 64, "max_context_tokens": CONTEXT, "prompt_form": "short"}
    return SolverAgent(
        f"{server}/v1/completions", "solver", tokenizer, Passages(), **(defaults | settings), retries=0
    )


def prompts(tokenizer: Any) -> list[list[int]]:
    asked = ("Who came?", "Where did Vell come from?", "What flows through Oldham?")
    return [
        render_prompt_ids(tokenizer, solver_messages(question, "short"), [SEARCH_TOOL_SCHEMA])
        for question in asked
    ]


def test_it_is_the_pinned_sglang_with_the_transformers_of_the_image(sglang_python: str) -> None:
    script = "from importlib.metadata import version as v; print(v('sglang'), v('transformers'))"
    command = [sglang_python, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [GPU_PINS["sglang"], GPU_PINS["transformers"]]


def test_attempts_search_and_answer_over_several_turns(server: str, tokenizer: Any) -> None:
    async def play() -> list[Any]:
        solver = agent(server, tokenizer)
        try:
            return await solver.attempts("Who came?", n=12)
        finally:
            await solver.aclose()

    attempts = asyncio.run(play())
    assert [attempt.failure for attempt in attempts] == [None] * 12
    assert any(attempt.searches and len(attempt.trajectory.turns) > 1 for attempt in attempts)
    assert {"Vell", "nobody"} & {attempt.answer for attempt in attempts}


def test_a_turn_ends_with_its_end_token_and_reads_back_as_the_ids_that_were_sampled(
    server: str, tokenizer: Any
) -> None:
    async def complete(prompt: list[int]) -> Any:
        solver = agent(server, tokenizer, temperature=0.0)
        try:
            return await solver._complete(prompt, 48, seed=None)
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


def test_greedy_tokens_are_those_of_transformers(server: str, speaking_model: Path, tokenizer: Any) -> None:
    reference = AutoModelForCausalLM.from_pretrained(speaking_model, dtype=torch.float32)
    for prompt in prompts(tokenizer):
        with torch.no_grad():
            ids = reference.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
        request = {"model": "solver", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        request |= {"skip_special_tokens": False, "no_stop_trim": True}
        answer = httpx.post(f"{server}/v1/completions", json=request, trust_env=False).json()["choices"][0]
        assert answer["text"] == tokenizer.decode(ids[len(prompt) :])


def test_a_prompt_beyond_the_context_is_an_error_of_the_configuration(server: str, tokenizer: Any) -> None:
    async def ask() -> None:
        solver = agent(server, tokenizer, max_context_tokens=8 * CONTEXT, prompt_form="full")
        try:
            await solver._complete([5] * (2 * CONTEXT), 8, seed=None)
        finally:
            await solver.aclose()

    with pytest.raises(SolverServerError, match=r"HTTP 400.*context length"):
        asyncio.run(ask())


def test_its_metrics_count_tokens_under_the_name_that_liveness_reads(server: str) -> None:
    config = resolve(compose_stage("challenger", ["hardware=8xh100", "solver.port=1"]))
    (name,) = solver_spec(config).check.work
    metrics = httpx.get(f"{server}/metrics", follow_redirects=True, trust_env=False).text
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"{name}{{"))
    assert float(line.rpartition(" ")[2]) > 0
