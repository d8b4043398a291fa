"""`drzero fetch-models` against a hub on loopback."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from loopback_hub import REVISION, LoopbackHub

from drzero.cli import main
from drzero.commands.models import wanted_files
from drzero.recipe.compose import compose_stage, resolve, write_resolved

POLICY = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b'{"b": 2}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "original/consolidated.safetensors": b"and again",
}
EMBEDDER = {"modules.json": b"[]", "1_Pooling/config.json": b'{"c": 3}', "pytorch_model.bin": b"its weights"}
STAGE = ["base_model=org/policy", "retrieval.embedder=org/embedder"]
SAMPLED = ("preview", "warm-start")  # a sample of `source=` is indexed by the small embedder on a CPU
# One process for all command lines: each import of torch and transformers takes ten seconds.
_SCRIPT = """
import json, sys
from drzero.cli import main
for words in json.load(sys.stdin):
    print("exit", main(["fetch-models", *words]), file=sys.stderr)
"""


def fetch(url, cache, *lines):
    """Exit codes and other lines of standard error."""
    own = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(lines),
        env={**os.environ, **own, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    printed = done.stderr.splitlines()
    codes = [int(line.split()[1]) for line in printed if line.startswith("exit ")]
    return codes, [line for line in printed if line.startswith("drzero ")]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What came of command lines, one after the other."""
    cache, runs = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("runs")
    (runs / "solver_iter1_hf").mkdir()
    evaluated = [f"paths.checkpoints={runs}", "run.name=evaluate_iter1", "retrieval.embedder=org/gone"]
    write_resolved(resolve(compose_stage("evaluate", evaluated)))
    with LoopbackHub({"org/policy": POLICY, "org/embedder": EMBEDDER}) as hub:
        codes, errors = fetch(
            hub.url,
            cache,
            ["challenger", *STAGE],
            ["challenger", *STAGE],
            ["evolve", "loop=full", *STAGE],
            ["challenger", f"base_model={cache}", "retrieval.embedder=packaged-minilm"],
            ["challenger", "base_model=org/polisy", "retrieval.embedder=org/embedder"],
            # This hub has neither the embedder that model= brings nor the one of the agent's run.
            *(
                [stage, "source=a.jsonl", "hardware=cpu", "model=qwen2.5-3b", f"base_model={cache}"]
                for stage in SAMPLED
            ),
            ["ask", f"paths.checkpoints={runs}"],
        )
    return SimpleNamespace(fetched=hub.fetched, cache=cache, codes=codes, errors=errors)


def test_a_stages_models_and_its_embedder_are_fetched_in_one_format(session):
    policy = {f"org/policy/{name}" for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert set(session.fetched) == policy | {f"org/embedder/{name}" for name in EMBEDDER}
    snapshot = session.cache / "hub" / "models--org--policy" / "snapshots" / REVISION
    assert (snapshot / "model.safetensors").read_bytes() == b"weights"


def test_stages_with_local_or_fetched_models_succeed_and_nothing_is_fetched_again(session):
    assert session.codes[:4] == [0, 0, 0, 0], session.errors
    assert len(session.fetched) == len(set(session.fetched))


def test_the_models_are_those_of_the_command_itself(session):
    assert session.codes[5:] == [*([0] * len(SAMPLED)), 2]
    assert "retrieval.embedder: org/gone" in session.errors[-1]


def test_a_model_that_the_hub_does_not_have_is_one_line_with_its_key(session):
    assert session.codes[4] == 2
    line, _ = session.errors
    assert "base_model: org/polisy could not be downloaded from the hub" in line


def test_a_silent_hub_is_one_line(tmp_path):
    codes, errors = fetch("http://127.0.0.1:9", tmp_path, ["challenger", *STAGE])
    assert codes == [2]
    (line,) = errors
    assert "could not be downloaded from the hub" in line


def test_offline_nothing_is_asked_for_and_a_stage_must_be_named(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["fetch-models", "challenger", *STAGE]) == 0
    assert "nothing is downloaded" in capsys.readouterr().out
    assert main(["fetch-models"]) == 2
    assert "name a stage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            "config.json a.bin a.safetensors onnx/model.onnx onnx/config.json README.md",
            "a.safetensors config.json",
        ),
        ("config.json pytorch_model.bin flax_model.msgpack", "config.json pytorch_model.bin"),
    ],
)
def test_weights_are_wanted_in_one_format_safetensors_first(names, wanted):
    assert wanted_files(names.split()) == wanted.split()


def test_the_models_that_environments_have_are_listed_next_to_the_options(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["list-models", f"paths.corpus={tmp_path}"]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if len(line.split()) > 2}
    assert "(env=bfcl-single-turn, bfcl-multi-turn)" in rows["Salesforce/xLAM-2-3b-fc-r"]
    assert "(env=wordle)" in rows["Qwen/Qwen2.5-0.5B-Instruct"]
    assert "(env=of your own)" in rows["Qwen/Qwen2.5-1.5B-Instruct"]
    assert rows["Qwen/Qwen2.5-3B-Instruct"].split()[0] == "qwen2.5-3b"
    assert "made by make wordle" in next(row for name, row in rows.items() if name.endswith("wordle-policy"))
