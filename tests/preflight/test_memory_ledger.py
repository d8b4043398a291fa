"""The memory ledger: parameters by formula against real models, and what each setting does to the sum."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from drzero.preflight.machine import Machine
from drzero.preflight.memory_ledger import (
    EMBEDDER_GIB,
    Ledger,
    host_ledger,
    micro_batch_tokens,
    offloaded_gib,
    pinned_ratio,
    retrieval_in_host_memory,
    trained,
    training_ledger,
    weights_backup_gib,
)
from drzero.preflight.model_shape import FAMILIES as COUNTED
from drzero.preflight.model_shape import KNOWN, ModelShape, load_shape, shape_of
from drzero.preflight.sglang_memory import CONTEXT_GIB, captured, kept_gib, outside_gib
from drzero.recipe.compose import compose_plain, resolve
from drzero.recipe.gpu_prices import GPUS

FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
}
GIB = 2**30


def count(config: PretrainedConfig) -> int:
    """Parameters of a real model, made without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=25)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_size=st.sampled_from([4, 8]),
    width=st.integers(1, 4),
    intermediate=st.integers(5, 40),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_a_formula_counts_what_transformers_makes(
    family, layers, kv_heads, groups, head_size, width, intermediate, tied, bias
):
    config = FAMILIES[family](
        vocab_size=37,
        hidden_size=kv_heads * groups * 2 * width,  # Transformers wants a multiple of the heads
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        tie_word_embeddings=tied,
        pad_token_id=0,
        **({} if family in ("mistral", "qwen2") else {"attention_bias": bias}),
        **({"mlp_bias": bias} if family in ("llama", "smollm3") else {}),
    )
    shape = shape_of(config.to_dict())
    assert shape is not None and shape.parameters == count(config)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("/corpus/models/Qwen3-32B", 32_762_123_264),
        ("/corpus/models/demo-policy", 134_515_008),
    ],
)
def test_a_shipped_model_has_its_published_parameters(model, parameters):
    shape = load_shape(model)
    assert shape is not None and shape.parameters == parameters


def test_every_family_that_is_counted_is_compared():
    assert set(COUNTED) == set(FAMILIES)


def test_a_model_of_another_family_is_not_guessed():
    assert shape_of({"model_type": "mixtral"}) is None


@pytest.mark.parametrize(
    ("scaling", "stretched"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 0),
        ({"rope_type": "llama3", "factor": 8.0}, 0),
        ({"rope_type": "default"}, 0),
        (None, 0),
    ],
)
def test_rope_scaling_stretches_the_context_as_sglang_reckons_it(scaling, stretched):
    config = LlamaConfig(max_position_embeddings=1024).to_dict() | {
        "rope_scaling": scaling,
        "rope_parameters": {},
    }
    shape = shape_of(config)
    assert shape is not None and (shape.context, shape.stretched_context) == (1024, stretched)


def test_the_shape_of_a_folder_is_that_of_its_config(tiny_model):
    shape = load_shape(str(tiny_model))
    assert shape is not None and shape.parameters == count(AutoConfig.from_pretrained(tiny_model))


# --- the sum ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    """The challenger on the paper's machine, with as many tokens a micro-batch as a tied model has."""
    tied = ["fused_head=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"]
    return resolve(compose_plain("challenger", ["hardware=8xh100", "model=qwen2.5-7b", *tied]))


MACHINE = Machine(True, False, GPUS["H100"], 8, 1, None)
SHAPE: ModelShape = KNOWN["qwen2.5-7b-instruct"]


ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
FSDP = f"{ACTOR}.fsdp_config"


def changed(config: DictConfig, changes: str) -> DictConfig:
    """The config with further settings, `key=value key=value`."""
    merged = OmegaConf.merge(config, OmegaConf.from_dotlist(changes.split()))
    assert isinstance(merged, DictConfig)
    return merged


def ledger(config: DictConfig, changes: str = "") -> Ledger:
    return training_ledger(changed(config, changes), MACHINE, SHAPE, SHAPE)


def test_adam_takes_16_bytes_a_weight_over_all_gpus(published):
    items = ledger(published).phases["update"]
    state = items["actor: weights"] + items["actor: gradients"] + items["actor: Adam"]
    assert state == pytest.approx(16 * SHAPE.parameters / 8 / GIB)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ("", 2),
        (f"{ROLLOUT}.temperature=0.8", 4),
        (f"{MODEL}.override_config.attn_implementation=sdpa", 10),
        (f"{ACTOR}.entropy_coeff=0.01", 10),
        (f"{ACTOR}.calculate_entropy=true", 10),
    ],
)
def test_the_gradient_of_logits_takes_their_place_where_flash_attn_computes_the_loss(
    published, changes, number
):
    tokens = micro_batch_tokens(published)
    assert tokens == 16384
    logits = ledger(published, f"{MODEL}.use_fused_kernels=false {changes}").phases["update"]["actor: logits"]
    assert logits == pytest.approx(number * tokens * 152064 / GIB)


def test_what_is_offloaded_is_on_the_gpu_for_the_update_alone(published):
    phases = ledger(published).phases
    assert "actor: Adam" not in phases["rollout"] and "actor: Adam" in phases["update"]
    kept = ledger(published, f"{FSDP}.optimizer_offload=false").phases["rollout"]
    # veRL has none left when it leaves the update.
    assert "actor: Adam" in kept and "actor: gradients" not in kept


def test_an_offload_policy_keeps_the_state_off_the_gpu(published):
    phases = ledger(published, f"{FSDP}.offload_policy=true").phases
    assert not any("Adam" in name for items in phases.values() for name in items)


@pytest.mark.parametrize(
    "changes",
    [
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        f"{ACTOR}.use_dynamic_bsz=false {ACTOR}.ppo_micro_batch_size_per_gpu=2",
        "solver.mem_fraction_static=0.1",
        f"{MODEL}.lora_rank=16 {MODEL}.lora.merge=true",
        f"{FSDP}.model_dtype=bf16",
    ],
)
def test_less_of_anything_leaves_more_for_the_update(published, changes):
    assert ledger(published, changes).total("update") < ledger(published).total("update")


def test_without_gradient_checkpointing_every_layer_is_kept(published):
    kept = ledger(published, f"{MODEL}.enable_gradient_checkpointing=false").phases["update"]
    layer = ledger(published).phases["update"]["actor: one layer"]
    assert kept["actor: activations"] == pytest.approx(28 * layer)


def test_a_fused_head_takes_the_same_for_any_number_of_tokens(published):
    items, fewer = (
        ledger(published, f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}").phases["update"]
        for tokens in (16384, 4096)
    )
    assert items["actor: head"] == fewer["actor: head"] and "actor: logits" not in items
    apart = ledger(published, f"{MODEL}.use_fused_kernels=false").phases["update"]
    assert apart["actor: logits"] > items["actor: head"]


def test_gradients_that_are_exchanged_once_are_whole_on_every_gpu(published):
    items = ledger(published, f"{FSDP}.use_no_sync_for_gradient_accumulation=true").phases["update"]
    assert items["actor: gradients"] == pytest.approx(4 * SHAPE.parameters / GIB)


def test_adams_step_needs_another_copy_unless_it_is_fused(published):
    assert "optimizer's step" not in ledger(published).phases
    items = ledger(published, f"{ACTOR}.optim.override_optimizer_config=null").phases["optimizer's step"]
    of_actor = sum(gib for name, gib in items.items() if name.startswith("actor"))
    assert of_actor == pytest.approx(20 * SHAPE.parameters / 8 / GIB)


@pytest.mark.parametrize(
    ("shape", "tokens", "recomputed", "fused_adam", "others", "measured"),
    [
        ("smollm2-135m", 15_126, True, False, {}, 3.30),
        ("smollm2-135m", 15_126, True, False, {"override_config": {"attn_implementation": "sdpa"}}, 3.81),
        ("smollm2-135m", 15_126, False, False, {}, 13.32),
        ("smollm2-135m", 30_251, False, False, {}, 23.25),
        ("qwen2.5-3b-instruct", 15_561, True, False, {}, 57.55),
        ("qwen2.5-3b-instruct", 4_000, False, False, {}, 66.90),
        # On an H200.
        ("qwen2.5-3b-instruct", 11_136, True, True, {}, 51.18),
        ("qwen2.5-3b-instruct", 11_136, True, True, {"use_liger": True}, 51.10),
        ("qwen2.5-3b-instruct", 6_681, False, True, {}, 79.88),
        ("qwen2.5-3b-instruct", 11_136, False, True, {}, 99.46),
        ("qwen2.5-3b-instruct", 11_136, False, True, {"use_liger": True}, 84.69),
    ],
)
def test_the_update_takes_what_was_measured_within_a_tenth(
    shape, tokens, recomputed, fused_adam, others, measured
):
    """The peaks in docs/gpu.md, with the tokens that a micro-batch really had."""
    config = resolve(compose_plain("solver", ["hardware=single_gpu", "model=qwen2.5-3b"]))
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    actor.ppo_max_token_len_per_gpu, model.enable_gradient_checkpointing = tokens, recomputed
    actor.fsdp_config.offload_policy = False
    actor.optim.override_optimizer_config = {"fused": fused_adam}
    model.update(others)
    one = Machine(True, False, GPUS["H100"], 1, 1, None)
    phases = training_ledger(config, one, KNOWN[shape], KNOWN[shape]).phases
    sums = [sum(gib for name, gib in items.items() if name.startswith("actor")) for items in phases.values()]
    assert max(sums) == pytest.approx(measured, rel=0.1)


def test_an_engine_that_does_not_sleep_stays_during_the_update(published):
    awake = ledger(published, f"{ROLLOUT}.free_cache_engine=false").phases
    asleep = ledger(published).phases
    assert "rollout engine: share" in awake["update"] and "weight sync" not in awake
    assert "rollout engine: share" not in asleep["update"]
    assert 2.5 < asleep["update"]["rollout engine: asleep"] < asleep["rollout"]["rollout engine: outside it"]


def test_sglang_takes_its_share_of_what_is_free_when_it_starts(published):
    items = ledger(published).phases["rollout"]
    others = sum(gib for name, gib in items.items() if not name.startswith("rollout engine"))
    assert items["solver: share"] == pytest.approx(0.25 * (79.2 - CONTEXT_GIB))
    assert items["rollout engine: share"] == pytest.approx(0.5 * (79.2 - others - CONTEXT_GIB))


def captures() -> list[list[str]]:
    """bench/README.md's table of SGLang's own functions: GPUs, tp, sizes, GiB asleep and at work, reserve."""
    lines = (Path(__file__).parents[2] / "bench" / "README.md").read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| GPUs | tp | prefill |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def test_the_ledger_knows_what_sglang_captures_on_each_gpu():
    compared = set()
    for gpus, tp, prefill, batch, lengths, asleep, at_work, _ in captures():
        for name in gpus.split(", "):
            gib, each = GPUS[name].memory_gib, int(tp)
            capture = captured(gib, each)
            sizes = (capture.prefill_tokens, capture.batch, capture.prefill_lengths)
            assert [f"{size:,}" for size in sizes] == [prefill, batch, lengths]
            taken = (kept_gib(SHAPE, gib, each), outside_gib(SHAPE, gib, each))
            assert [f"{part:.1f}" for part in taken] == [asleep, at_work]
            compared.add((name, each))
    # Every GPU that has bfloat16; the page leaves out what repeats.
    assert {name for name, _ in compared} == {gpu.name for gpu in GPUS.values() if gpu.has_bf16}


def test_weights_are_synced_into_a_woken_engine_through_two_buckets_and_a_tensor(published):
    embedding = 4 * 152064 * 3584 / GIB  # more than the bucket's 2 GiB
    items = ledger(published).phases["weight sync"]
    assert items["rollout engine: weights"] == pytest.approx(2 * SHAPE.parameters / GIB)
    assert items["actor: buckets of weights"] == pytest.approx(3 * embedding)
    bucket = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    wider = ledger(published, f"{bucket}=4096").phases["weight sync"]
    assert wider["actor: buckets of weights"] == pytest.approx(2 * 4 + embedding)
    assert "actor: weights" not in items


def test_an_adapter_is_merged_on_the_gpu_or_leaves_the_engine_its_weights(published):
    apart = ledger(published, f"{MODEL}.lora_rank=16")
    merged = ledger(published, f"{MODEL}.lora_rank=16 {MODEL}.lora.merge=true")
    assert "actor: weights" in merged.phases["weight sync"]
    assert "rollout engine: weights" in apart.phases["update"]
    assert "rollout engine: weights" not in merged.phases["update"]


@pytest.mark.parametrize(
    ("changes", "pinned", "unpinned", "backed_up"),
    [
        ("", 12, 0, 8),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", 12, 0, 4),
        (f"{ROLLOUT}.free_cache_engine=false", 12, 0, 0),
        (f"{ROLLOUT}.name=reference", 12, 0, 0),
        (f"{MODEL}.lora_rank=16", 4, 0, 0),
        (f"{FSDP}.optimizer_offload=false", 4, 0, 8),
        (f"{FSDP}.offload_policy=true", 8, 8, 8),
    ],
)
def test_host_memory_holds_what_is_offloaded_and_a_copy_of_each_sleeping_engines_weights(
    published, changes, pinned, unpinned, backed_up
):
    config = changed(published, changes)
    bytes_a_weight = unpinned + pinned * pinned_ratio(SHAPE, 8)
    # An adapter's Adam states are a thousandth.
    assert offloaded_gib(config, SHAPE) == pytest.approx(bytes_a_weight * SHAPE.parameters / GIB, rel=0.05)
    assert weights_backup_gib(config, SHAPE, 8) == pytest.approx(2 * SHAPE.parameters / GIB * backed_up)


def test_pinned_memory_comes_in_powers_of_two():
    """Measured on an H200: 18.2 GB of host memory went when 3B's weights moved there."""
    shape = KNOWN["qwen2.5-3b-instruct"]
    assert 4e-9 * shape.parameters * pinned_ratio(shape, 1) == pytest.approx(18.2, rel=0.03)
    # Each of eight ranks has 32.4 MiB of an MLP's matrix, in 64.
    assert pinned_ratio(SHAPE, 8) == pytest.approx(1.9, abs=0.01)


@pytest.mark.parametrize(
    ("device", "encoders", "models"), [("cuda", 2, 1), ("cuda", 9, 2), ("cuda:1", 3, 3), ("cpu", 2, 0)]
)
def test_encoders_take_turns_on_the_gpus(published, device, encoders, models):
    items = ledger(published, f"retrieval.device={device} retrieval.encoders={encoders}").phases["update"]
    assert items.get("encoders (of one GPU)", 0) == models * EMBEDDER_GIB


def test_encoders_and_the_indexs_graph_lie_in_host_memory(published, tmp_path):
    (tmp_path / "segment").mkdir()
    (tmp_path / "segment" / "data_level0.bin").write_bytes(bytes(1 << 20))
    here = changed(published, f"retrieval.device=cpu retrieval.encoders=3 chroma.path={tmp_path}")
    assert retrieval_in_host_memory(here) == {"encoders": 3 * EMBEDDER_GIB, "index": 2**20 / GIB}
    elsewhere = changed(published, "retrieval.device=cuda chroma.path=http://127.0.0.1:9")
    assert retrieval_in_host_memory(elsewhere) == {}


def test_without_a_gpu_each_engine_has_its_weights_and_a_cache_for_its_sequences():
    shape = KNOWN["demo-policy"]
    words = ["hardware=cpu", "rollout=sglang", "solver.dtype=bfloat16"]
    config = resolve(compose_plain("challenger", words))
    machine = Machine(True, True, None, 0, 1, 24.0)
    needed = host_ledger(config, machine, shape, shape).phases["training"]
    assert needed["rollout engine: weights"] == pytest.approx(4 * shape.parameters / GIB)
    assert needed["rollout engine: KV cache"] == pytest.approx(16 * 1473 * 2 * 4 * 30 * 192 / GIB)
    assert needed["solver: weights"] == pytest.approx(2 * shape.parameters / GIB)
    assert needed["solver: processes"] == needed["rollout engine: processes"] == 3
    twice = host_ledger(changed(config, "machine.gpus=2"), machine, shape, shape).phases["training"]
    assert twice["rollout engine: weights"] == 2 * needed["rollout engine: weights"]
    assert twice["solver: weights"] == needed["solver: weights"]


def test_an_adapter_is_what_is_trained(published):
    layer = 4 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert trained(changed(published, f"{MODEL}.lora_rank=1"), SHAPE) == 28 * layer
