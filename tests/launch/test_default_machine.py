"""The machine that a launch says would do is the smallest whose memory ledger holds its model."""

import json
from pathlib import Path

import pytest

from drzero.launch.compute import load_compute
from drzero.launch.default_machine import FITS, LABS, billions_of, default_machine, smallest_machine
from drzero.preflight.model_shape import ModelShape, config_of
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage
from drzero.recipe.gpu_prices import GPUS

MACHINES = sorted(
    ("t4", "a10g", "a100-40gb", "single_h100", "4xa100-80gb", "8xh100"),
    key=lambda name: load_compute(name).usd_per_hour,
)
HUB = {
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 64, 4864, 151936, 32768, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 128, 8960, 151936, 32768, tied=True, qkv_bias=True),
}
"""Published sizes of models without an option of their own."""
MODELS = ("demo-policy", *HUB, "qwen2.5-3b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3-32b")


def holds(machine: str, stage: str, model: str, folder: Path) -> bool:
    """Whether preflight has nothing against this model in this stage on this machine."""
    if model in HUB:
        (folder / "config.json").write_text(json.dumps(config_of(HUB[model])))
    chosen = f"base_model={folder}" if model in HUB else f"model={model}"
    loaded = ["challenger=${base_model}"] if stage == "synthesize" else []
    loaded += ["iteration=0"] if stage == "evaluate" else []
    places = ["paths.corpus=/nonexistent", "paths.checkpoints=/nonexistent"]
    compute = load_compute(machine)
    words = [f"hardware={compute.hardware}", *compute.overrides(), chosen, *places, *loaded]
    words += ["rollout=sglang"] if stage in LABS else []
    words += ["serve=true"] if stage == "agent-bench" else []
    report = preflight(compose_stage(stage.replace("-", "_"), words), stage.replace("-", "_"))
    assert report.ledger is not None
    return not report.errors


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(("evaluate",), id="evaluate"),
        pytest.param(LABS, id="labs"),
        pytest.param(("synthesize",), id="synthesize", marks=pytest.mark.slow("its ledger is evaluate's")),
        pytest.param(
            ("challenger", "solver"), id="training", marks=pytest.mark.slow("a second per config of veRL's")
        ),
    ],
)
def test_it_holds_the_model_and_the_next_smaller_one_with_bfloat16_does_not(tmp_path, stages, model):
    chosen = smallest_machine(stages[-1], model)
    assert chosen is not None
    stages = stages[1:] if stages == LABS and model == "qwen3-32b" else stages  # no GPU has it in float32
    smaller = [name for name in MACHINES[: MACHINES.index(chosen)] if GPUS[load_compute(name).type].has_bf16]
    assert all(holds(chosen, stage, model, tmp_path) for stage in stages)
    assert not smaller or not all(holds(smaller[-1], stage, model, tmp_path) for stage in stages)


def test_larger_models_never_get_a_smaller_machine():
    for stage in ("evaluate", "challenger"):
        places = [MACHINES.index(smallest_machine(stage, f"a/b-{billions}B") or "") for billions in FITS]
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5),
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("Qwen/Qwen3-30B-A3B", 30),
        ("/corpus/models/Qwen3-32B/", 32),
        ("mistralai/Mixtral-8x7B-v0.1", None),
        ("${paths.corpus}/models/tiny", None),
    ],
)
def test_a_models_size_is_read_from_its_name(model, billions):
    assert billions_of(model) == billions


def test_of_a_model_of_unknown_size_or_too_large_for_all_no_machine_is_said_to_hold_it():
    assert smallest_machine("evaluate", "me/my-model") is None
    assert smallest_machine("evaluate", "meta-llama/Llama-3.1-70B") is None
    assert default_machine("serve-model", "me/my-model", rehearses=False)[0] == "single_h100"
    assert default_machine("serve-model", "meta-llama/Llama-3.1-70B", rehearses=False)[0] == "8xh100"
