"""Evaluations over chat completions: a scripted endpoint, and one server by chat and by token ids.

The scripted runs are the real command with a real index and retrieval service.
"""

import json
import re

import pytest
from scripted_endpoint import KEY, MODEL, RIVERS, TOWNS, scripted_endpoint, write_towns
from served_model import served_model

from drzero.cli import main

NOWHERE = "On which river does the town of Nowhere lie?"


@pytest.fixture(scope="module")
def towns(tmp_path_factory, tiny_model):
    """An index of the towns and questions about them; the last one has no right answer there."""
    folder = tmp_path_factory.mktemp("towns")
    lines = [f"On which river does the town of {t} lie?,{r}" for t, r in zip(TOWNS, RIVERS, strict=True)]
    (folder / "exam.csv").write_text("\n".join(["question,answer", *lines, f"{NOWHERE},Styx"]) + "\n")
    sizes = [f"base_model={tiny_model}", "rows=4", "heldout_rows=0", "hop_ratio=[1]", "min_document_tokens=0"]
    assert main(["prepare-data", *common(folder), f"source={write_towns(folder)}", *sizes]) == 0
    return folder


def common(folder):
    places = [f"paths.corpus={folder}/corpus", f"paths.checkpoints={folder}/runs", "run.min_free_gb=0.1"]
    return ["hardware=cpu", "retrieval.embedder=packaged-minilm", "process_env.OMP_NUM_THREADS=1", *places]


def chat(folder, url, name, *more):
    """The arguments of an evaluation over chat completions."""
    asked = [f"endpoint={url}", "api=chat", f"model={MODEL}", f"benchmarks=[{folder}/exam.csv]"]
    return ["evaluate", *common(folder), *asked, f"run.name={name}", *more]


def report(folder):
    return dict(json.loads((folder / "report.json").read_text()))


def answers(folder):
    lines = map(json.loads, (folder / "answers.jsonl").read_text().splitlines()[1:])
    return {line["key"]: line for line in lines}


def test_a_hosted_model_is_scored_and_priced_over_chat_and_compared(towns, tiny_model, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    folder, prices = towns / "runs" / "hosted", ["usd_per_million_in=1", "usd_per_million_out=10000"]
    with scripted_endpoint(drop_every=4) as endpoint:
        arguments = chat(towns, endpoint.url, "hosted", *prices)
        assert main(arguments) == 0
        asked = len(endpoint.requests)
        assert main(arguments) == 0 and len(endpoint.requests) == asked
        capsys.readouterr()
        ids = ["api=completions", f"tokenizer={tiny_model}", "model=qwen2.5-3b", f"endpoint_model={MODEL}"]
        assert main([*(word for word in arguments if not word.startswith(("api=", "model="))), *ids]) == 2
        assert "api was 'chat' and is 'completions'" in capsys.readouterr().err
    score = report(folder)["benchmarks"]["exam"]
    assert (score["n"], round(score["em"] * 7), score["searches"], score["failed"]) == (7, 6, 1.0, 0)
    assert endpoint.dropped and asked == 1 + 14 + endpoint.dropped  # one greeting, and two turns a question
    assert {(one["temperature"], one.get("seed")) for one in endpoint.requests[1:]} == {(0.0, None)}
    cost = report(folder)["cost"]
    assert cost["tokens_out"] == 14 * 20
    assert cost["usd"] == pytest.approx((cost["tokens_in"] + 10000 * cost["tokens_out"]) / 1e6)
    for path in folder.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
    with scripted_endpoint() as endpoint:
        assert main(chat(towns, endpoint.url, "again", "solver.max_turns=4")) == 0
    assert report(towns / "runs" / "again")["endpoint"]["failed_requests"] == 0
    capsys.readouterr()
    assert main(["compare", str(folder), str(towns / "runs" / "again")]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^before: 6 of 7 right, {MODEL} at http.*/v1 \({folder}\)$", said, re.MULTILINE)
    assert "solver.max_turns was 5 and is 4" in said and re.search(r"exam +7 +0\.857 +0\.857", said)


def by(api, prepared, model, folder, url):
    """The answers to the demo's questions over one of both requests, without what varies."""
    settings = ["iteration=0", "questions_per_benchmark=3", "solver.concurrency=1", f"run.name={api}"]
    asked = [f"endpoint={url}", f"tokenizer={model}", f"api={api}"]
    assert main(["evaluate", *prepared.overrides(folder), *settings, *asked]) == 0
    found = answers(folder / api)
    return {key: {**record, "latency_s": 0} for key, record in found.items()}


def test_the_same_server_gives_the_same_answers_by_chat_as_by_token_ids(prepared, speaking_model, tmp_path):
    with served_model(speaking_model, "speaking", max_seq_len=1472) as (url, _):
        chatted, by_ids = (
            by(api, prepared, speaking_model, tmp_path, url) for api in ("chat", "completions")
        )
    assert len(by_ids) == 12 and chatted == by_ids
    assert any(record["searches"] for record in by_ids.values())
