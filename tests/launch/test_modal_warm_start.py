"""The warm start's guide on Modal: a preview made here is uploaded, and a model learns from it there."""

from __future__ import annotations

import json

import pytest
from modal_checkout import run_action, stage_plane
from scripted_endpoint import KEY, MODEL, scripted_endpoint, write_towns
from stage_run import RUN_LIMIT_S

from drzero.cli import main
from drzero.recipe.compose import compose_stage

pytestmark = [
    pytest.mark.timeout(4 * RUN_LIMIT_S),
    pytest.mark.slow("a preview, and a training in a container; test_request.py has what is launched"),
]

PREVIEW = ["documents=12", "hop_ratio=[1,1]", "min_document_tokens=0", "fit_hops=false", "hardware=cpu"]
SIZES = ["held_out_share=0.3", "least=4", "batch_size=4", "epochs=2", "check=2", "min_document_tokens=0"]
LIMITS = ["solver.max_context_tokens=2048", "learning_rate=1e-3", "process_env.OMP_NUM_THREADS=1"]


@pytest.fixture(scope="module")
def preview(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    places = [f"paths.corpus={folder}/corpus", f"paths.checkpoints={folder}/runs", "compute.max_usd=null"]
    with scripted_endpoint() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        teacher = [f"source={write_towns(folder)}", f"endpoint={endpoint.url}", f"model={MODEL}"]
        assert main(["preview", *teacher, *places, *PREVIEW]) == 0
    return folder / "runs" / "preview"


def test_a_preview_that_was_uploaded_teaches_a_model_that_the_next_stage_takes(
    preview, speaking_model, checkout, tmp_path
):
    with stage_plane(tmp_path / "plane") as plane:
        for source, target in (preview, "preview"), (speaking_model, "models/tiny"):
            run_action(plane, checkout, "upload", str(source), target).succeeded()
        corpus = plane.volume("dr-zero-corpus").folder
        words = ["--gpu-count", "0", "--model", "demo-policy", f"base_model={corpus}/models/tiny"]
        words += [f"from={corpus}/preview", *SIZES, *LIMITS, "run.min_free_gb=0.1"]
        run_action(plane, checkout, "warm-start", *words, seconds=RUN_LIMIT_S).succeeded()
        committed = plane.volume("dr-zero-checkpoints").committed()
        assert (committed / "launches" / "warm_start" / "spend.json").is_file()
        report = json.loads((committed / "warm_start" / "report.json").read_text())
        assert report["after"] and report["losses"]["last_train"] is not None
        made = compose_stage("challenger", ["hardware=cpu", f"model={committed}/warm_start/model"])
        assert made.prompts.form == "short"
        assert "[training] " in run_action(plane, checkout, "logs", "warm_start").succeeded().stdout
