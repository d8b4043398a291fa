"""A training that does not fit its machine is refused with settings that do, which compose and pass."""

import pytest

from drzero.launch.arguments import parse
from drzero.launch.request import resolve
from drzero.preflight.finding import Severity
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage

OFFLOADED = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
ADAPTER = (
    "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 "
    "actor_rollout_ref.model.lora.merge=true"
)


def judged(function, words):
    """The errors about memory of a launch, and the launch's command."""
    request = resolve(parse(words.split(), function))
    stage, *overrides = request.checked
    report = preflight(compose_stage(stage, overrides), stage)
    assert report.ledger is not None
    keys = ("memory", "gpu_memory", "mem_fraction", "batch_size", "max_num_seqs", "token_len", "base_model")
    found = [one for one in report.findings if one.severity is Severity.ERROR]
    return [str(one) for one in found if any(key in one.key for key in keys)]


@pytest.mark.parametrize(
    ("function", "words", "ways"),
    [
        (
            "train",
            "--env vf-wordle --model Qwen/Qwen2.5-3B-Instruct --gpu-type A100-40GB",
            [f"{OFFLOADED} compute.memory=90112", f"{ADAPTER} compute.memory=40960"],
        ),
        (
            "train",
            "--config-path config/runs/wordle.yaml --model qwen2.5-7b --gpu-type A100-80GB",
            [f"{OFFLOADED} compute.memory=212992", f"{ADAPTER} compute.memory=57344"],
        ),
        (
            "train",
            "--env wordle --gpu-type T4 rollout=reference actor_rollout_ref.actor.use_dynamic_bsz=false "
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            [f"{OFFLOADED} compute.memory=40960", f"{ADAPTER} actor_rollout_ref.rollout.max_num_seqs=32"],
        ),
        (
            "main",
            "--action challenger --model qwen2.5-3b --gpu-type A100-40GB",
            ["actor_rollout_ref.rollout.max_num_seqs=32 solver.max_batch_size=32 compute.memory=90112"],
        ),
        (
            "main",
            "--action challenger --model Qwen/Qwen2.5-0.5B-Instruct --gpu-type T4",
            [
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 "
                "actor_rollout_ref.rollout.max_num_seqs=32 solver.max_batch_size=32 compute.memory=40960"
            ],
        ),
        ("main", "--action solver --model qwen2.5-3b --gpu-type T4", []),
        ("train", "--env wordle --model qwen2.5-3b --gpu-type T4", []),
    ],
)
def test_a_model_too_large_for_its_gpu_is_refused_with_what_fits_there(function, words, ways):
    errors = judged(function, words)
    told = [text.partition("this fits: ")[2] for text in errors if "this fits: " in text]
    forms = ("", "set {}", "train whole weights with {}, or an adapter with {}")
    assert errors and "".join(told) == forms[len(ways)].format(*ways)
    # A number that is as low as it gets is not to be lowered.
    assert not any("to 1 at least" in text for text in errors)
    for way in ways:
        assert judged(function, f"{words} {way}") == []
