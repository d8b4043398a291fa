"""compare-rollouts with a real SGLang server of the pinned version, on a CPU."""

import json

import pytest
from sglang_server import serving

from drzero.cli import main

pytestmark = [pytest.mark.slow("starts SGLang"), pytest.mark.timeout(900)]


def test_sglang_agrees_with_transformers_in_everything(sglang_python, speaking_model, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    asked = ("Who came?", "Where did Vell come from?", "What flows through Oldham?")
    questions.write_text("".join(json.dumps({"question": q, "answers": ["Vell"]}) + "\n" for q in asked))
    with serving(sglang_python, speaking_model, tmp_path / "sglang.log", 1024, sequences=16) as url:
        words = [f"model={speaking_model}", f"data={questions}", f"endpoint={url}/v1", "hardware=cpu"]
        words += ["prompts.form=short", "compare.tokens=48", "solver.concurrency=16", "solver.dtype=float32"]
        code = main(["compare-rollouts", *words, f"paths.checkpoints={tmp_path}"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert "3 of 3 equal" in said.out
