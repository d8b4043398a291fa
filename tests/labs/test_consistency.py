"""compare-rollouts: a healthy engine agrees with Transformers, and each planted fault is found and named.

The engine is the real one, served on loopback to the real command; its model is tiny, random, and as sure of
its next token as a trained one.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request
from served_model import served
from solver_rows import solver_row
from tiny_model import save_tiny_model

from data.parquet_io import training_row, write_training_rows
from data.question_rows import FieldNames
from drzero.cli import main
from drzero.labs.compare_rollouts import WORST
from drzero.labs.consistency.checks import TransformersSide, check_greedy
from drzero.labs.consistency.engine import Continued
from drzero.labs.consistency.prompts import OF_CHALLENGER, OF_SOLVER, Prompt, Wording, load_prompts
from drzero.labs.consistency.sampling import SETTINGS, check_sampling
from drzero.labs.consistency.verdict import Tolerances
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage
from verl_ext.engine.api_server import create_app
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import load_model
from verl_ext.engine.sampling import SamplingParams
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

QUESTIONS = ("Who founded Orrin?", "What flows through Oldham?", "Where was Vell born?", "Which town is old?")
CONTEXT, TOKENS = 2048, 24
LIMITS = Tolerances(0.001, 1e-4, 0.005, 0.0, 0.05, 1e-5)


@pytest.fixture(scope="module")
def model_folder(smollm2_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "sure"
    spread = {"initializer_range": 0.2, "tie_word_embeddings": False}
    return save_tiny_model(folder, tokenizer=smollm2_tokenizer, surer=6, **spread)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answers": ["Vell"]}) + "\n" for q in QUESTIONS))
    return path


def application(folder, change=lambda params: params):
    """The reference engine's own server over a model, its engine and its tokenizer."""

    class Changed(ReferenceEngine):
        async def generate(self, prompt_ids, params, *rest, **more):
            return await super().generate(prompt_ids, change(params), *rest, **more)

    model, tokenizer = load_model(str(folder))
    engine = Changed(model, eos_token_ids=[tokenizer.eos_token_id], max_seq_len=CONTEXT)
    return create_app(engine, tokenizer, "sure"), engine, tokenizer


@dataclass(frozen=True)
class Compared:
    """How the command ended."""

    code: int
    folder: Path
    out: str
    err: str
    worst: list[dict[str, Any]]

    def row(self, check):
        return next(line for line in self.out.splitlines() if line.strip().startswith(check))


@pytest.fixture
def compare(model_folder, questions, tmp_path, capsys, request):
    def run(endpoint, *overrides):
        words = [f"model={model_folder}", f"data={questions}", "hardware=cpu", f"endpoint={endpoint}"]
        words += ["n=4", f"compare.tokens={TOKENS}", f"paths.checkpoints={tmp_path}", "solver.dtype=float32"]
        words += ["compare.draws=50", *overrides]
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "400")
            code = main(["compare-rollouts", *words])
        said = capsys.readouterr()
        folder = tmp_path / "compare_rollouts"
        records = (folder / WORST).read_text().splitlines() if (folder / WORST).exists() else []
        return Compared(code, folder, said.out, said.err, [json.loads(line) for line in records])

    return run


def test_the_healthy_engine_agrees_in_everything(compare, model_folder):
    with served(application(model_folder)[0]) as address:
        found = compare(address)
    assert found.code == 0, found.out + found.err
    assert "4 of 4 equal, 0 part at a tie, 0 truly differ" in found.row("greedy sequences")
    judged = ("greedy sequences", "log-probabilities", *SETTINGS, "score")
    assert all("PASS" in found.row(check) for check in judged), found.out
    assert "FAIL" not in found.out and examine(found.folder).state == "finished"


@pytest.mark.slow("another server; the first tier finds a sampler that is wrong")
def test_a_wrong_rope_base_is_found_in_sequences_and_log_probs(compare, model_folder, tmp_path):
    faulty = tmp_path / "faulty"
    faulty.mkdir()
    for file in model_folder.iterdir():
        (faulty / file.name).write_bytes(file.read_bytes())
    config = json.loads((faulty / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    config["rope_parameters"]["rope_theta"] = 1_000_000.0
    (faulty / "config.json").write_text(json.dumps(config))
    with served(application(faulty)[0]) as address:
        found = compare(address)
    assert found.code == 1
    assert "disagree: greedy sequences, log-probabilities" in found.err and "rope base" in found.err
    first = next(record for record in found.worst if record["check"] == "greedy sequences")
    sides = first["engine"], first["transformers"]
    assert sides[0][0]["id"] != sides[1][0]["id"] and first["nats"] > LIMITS.tie
    assert [len(side) for side in sides] == [2, 2]
    assert f"{first['prompt']}, token {first['position']}, after" in found.out
    death = examine(found.folder)
    assert death.state == "failed" and "disagree: greedy sequences" in death.sentence


def test_a_sampler_that_ignores_top_p_is_found_by_its_draws(compare, model_folder):
    with served(application(model_folder, lambda params: replace(params, top_p=1.0))[0]) as address:
        found = compare(address, "compare.draws=100", "compare.places=4")
    assert found.code == 1
    assert "disagree: top-p 0.7. Where to look: the engine's sampler" in found.err
    assert "FAIL" in found.row("top-p 0.7") and "PASS" in found.row("greedy sequences")


def with_chat(folder, shows):
    """The engine's server with another chat endpoint, which renders some of the messages."""
    app, engine, tokenizer = application(folder)

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        ids = render_prompt_ids(tokenizer, shows(body["messages"]), body["tools"])
        made = await engine.generate(ids, SamplingParams(max_tokens=body["max_tokens"], temperature=0))
        message = {"role": "assistant", "content": tokenizer.decode(made.token_ids)}
        return {
            "choices": [{"message": message, "prompt_token_ids": ids}],
            "usage": {"prompt_tokens": len(ids)},
        }

    app.router.routes.insert(0, app.router.routes.pop())  # ahead of the server's own
    return app


@pytest.mark.slow("another server; the first tier finds a sampler that is wrong")
def test_a_server_that_drops_the_system_prompt_is_found(compare, model_folder):
    def without_system(messages):
        return [message for message in messages if message["role"] != "system"]

    prompted = [{"role": "system", "content": "Answer in one word."}]
    rows = [solver_row(index, "train", "Vell") for index in range(3)]
    for row in rows:
        row["prompt"] = [*prompted, *solver_messages(row["extra_info"]["question"], "short", 5)]
    path = model_folder.parent / "rows.parquet"
    write_training_rows(path, rows)
    with served(with_chat(model_folder, without_system)) as address:
        found = compare(address, f"data={path}", "n=3")
    assert found.code == 1
    assert "disagree: prompt of messages. Where to look: the server renders messages differently" in found.err
    assert "0 of 3 as ours" in found.row("prompt of messages")
    assert "tokens for our" in found.row("prompt of messages")


def test_an_endpoint_of_text_alone_is_refused_with_what_can_be_compared(compare, start_peer):
    def answer(body):
        return {"choices": [{"text": " Vell", "finish_reason": "stop"}]}

    peer = start_peer("/v1/completions", answer, {"/v1/models": {"data": [{"id": "text"}]}})
    found = compare(f"{peer.url}/v1")
    assert found.code == 1
    assert "no token ids or log-probabilities" in found.err


def test_a_file_that_is_not_there_is_refused_before_the_engine_is_asked(compare):
    found = compare("http://127.0.0.1:1/v1", "data=nowhere.jsonl")
    assert found.code == 2
    assert "nowhere.jsonl" in found.err


def test_a_tie_is_told_from_a_true_difference_by_the_log_probs_of_both(model_folder, smollm2_tokenizer):
    transformers = TransformersSide(load_model(str(model_folder))[0])
    prompt = Prompt("it", [], smollm2_tokenizer.encode("The capital of France is"), OF_SOLVER, lambda _: 0.0)
    ids = transformers.continue_greedily(prompt.ids, 6, [0])
    last = transformers.log_probs(prompt.ids, ids)[-1].topk(2)
    margin = float(last.values[0] - last.values[1])
    made = Continued([*ids[:-1], int(last.indices[1])], [0.0] * len(ids), [])

    def passes(tie):
        check, parted = check_greedy(
            [prompt], [made], transformers, smollm2_tokenizer, replace(LIMITS, tie=tie)
        )
        assert parted == {0: len(ids) - 1}
        return check.passed

    assert margin > 0
    assert [passes(margin * 1.01), passes(margin * 0.99)] == [True, False]


def test_where_the_model_is_too_sure_to_tell_the_sampler_is_not_judged():
    sure = torch.tensor([0.0, -20.0, -21.0]).log_softmax(-1)
    for name in ("temperature 1", "top-p 0.7"):
        assert check_sampling(name, [[0] * 100], [sure], LIMITS).passed is None


def test_a_row_is_scored_as_its_stage_scores_it(tmp_path, smollm2_tokenizer):
    document = "Oldham\nVell came to Oldham by boat."
    extra = {"index": 1, "split": "train", "hop": 1, "doc_id": "d", "document": document, "question": None}
    metadata = {"corpus_id": "c", "generator_checkpoint": None, "seed": 0, "trajectory": None}
    asking = training_row("search_zero_1", challenger_messages(document, 1, "short"), None, extra, metadata)
    write_training_rows(
        tmp_path / "rows.parquet", [solver_row(0, "train", "Vell"), solver_row(1, "train", "3.14"), asking]
    )
    wording = Wording("short", 5, FieldNames(None, None, None))
    answered, pi, asked = load_prompts(str(tmp_path / "rows.parquet"), smollm2_tokenizer, wording, 3, 0)

    def scored(prompt, text):
        return prompt.score_of(smollm2_tokenizer, smollm2_tokenizer.encode(text))

    assert (answered.scored_by, asked.scored_by) == (OF_SOLVER, OF_CHALLENGER)
    assert scored(answered, "<answer>Vell</answer><|im_end|>") == 1.0
    assert scored(answered, "<answer>Vell</answer>") == 0.0  # cut off
    right = [scored(pi, f"<answer>{said}</answer><|im_end|>") for said in ("3.140", "314")]
    assert right == [1.0, 0.0]  # a number of a synthesized pair is compared as one
    question = "<think>So.</think><question>Who came by boat?</question><answer>Vell</answer><|im_end|>"
    assert scored(asked, question) == 1.0 and scored(asked, "Vell<|im_end|>") == 0.0
    messages = answered.messages
    assert answered.ids == render_prompt_ids(smollm2_tokenizer, messages, [SEARCH_TOOL_SCHEMA])


def test_its_short_names_are_keys_for_preflight_too(tmp_path, capsys):
    words = ["data=my/rows.parquet", "n=8", "hardware=cpu", f"base_model={tmp_path}"]
    config = compose_stage("compare_rollouts", words)
    assert (config.compare.data, config.compare.n) == ("my/rows.parquet", 8)
    main(["preflight", "compare-rollouts", *words, f"paths.checkpoints={tmp_path}"])
    out = capsys.readouterr().out
    assert "would replace the whole mapping" not in out and "error  base_model" in out


@pytest.mark.slow("a server of a 135M model; the tests above have a tiny one")
@pytest.mark.timeout(900)
def test_the_engine_of_the_profile_is_started_compared_and_stopped(tmp_path, capsys):
    from drzero.stages.demo_models import POLICY_NAME, prepare_demo_models

    prepare_demo_models(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": QUESTIONS[0], "answers": ["Vell"]}) + "\n")
    words = ["model=demo-policy", f"base_model={tmp_path / POLICY_NAME}", f"data={questions}", "hardware=cpu"]
    assert main(["compare-rollouts", *words, f"paths.checkpoints={tmp_path}", "compare.places=1"]) == 0
    assert "1 of 1 equal" in capsys.readouterr().out
