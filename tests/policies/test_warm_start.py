"""The warm start's conversations and its loss, and whether the demo's limits hold what it teaches."""

import hashlib
import random

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from data.demo_world import generate_world
from drzero.policies.demonstrations import make_demonstrations, world_retriever
from drzero.policies.warm_start import (
    OwnTokenTrainer,
    batched,
    collate,
    newest_checkpoint,
    write_adapter,
)
from drzero.recipe.compose import compose_stage, resolve
from verl_ext.method.demonstration import encode

HOPS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def conversations(smollm2_tokenizer):
    world = generate_world(17, "warmstart", chains_per_hop=30)
    each = dict.fromkeys(HOPS, 15)
    made = make_demonstrations(world, challenger=each, solver=each, retrieve=world_retriever(world, topk=2))
    return {
        kind: [encode(smollm2_tokenizer, one["messages"]) for one in made if one["kind"] == kind]
        for kind in ("challenger", "solver")
    }


def demo(stage):
    return resolve(compose_stage(stage, ["hardware=cpu"]))


def turns(example):
    """The tokens of each turn of the model's own."""
    lengths = [0]
    for is_own in example.own_T:
        if is_own:
            lengths[-1] += 1
        elif lengths[-1]:
            lengths.append(0)
    return lengths if lengths[-1] else lengths[:-1]


@pytest.mark.parametrize("kind", ["challenger", "solver"])
def test_training_holds_perfect_conversations_of_up_to_four_hops(kind, conversations):
    config = demo(kind)
    for example in conversations[kind]:
        prompt = example.own_T.index(True)
        assert prompt <= config.data.max_prompt_length
        assert len(example.ids_T) - prompt <= config.data.max_response_length
        assert len(turns(example)) <= config.rollout.max_turns
        assert max(turns(example)) <= config.rollout.max_tokens_per_turn


@pytest.mark.parametrize(
    ("stage", "kind"), [("challenger", "solver"), ("synthesize", "challenger"), ("evaluate", "solver")]
)
def test_so_do_attempts_sampling_and_evaluation(stage, kind, conversations):
    solver = demo(stage).solver
    for example in conversations[kind]:
        assert len(example.ids_T) <= solver.max_context_tokens
        assert len(turns(example)) <= solver.max_turns
        assert max(turns(example)) <= solver.max_tokens_per_turn


def test_every_conversation_is_trained_on_once_and_next_to_others_of_like_length(conversations):
    examples = conversations["challenger"] + conversations["solver"]
    order = batched(examples, 4, random.Random(0))
    assert sorted(map(id, order)) == sorted(map(id, examples))
    padded = sum(4 * max(len(e.ids_T) for e in order[i : i + 4]) for i in range(0, len(order), 4))
    assert padded < 1.15 * sum(len(example.ids_T) for example in examples)


def test_the_loss_is_the_mean_over_own_tokens_and_padding_changes_nothing(
    tiny_model, conversations, tmp_path
):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2))
    batch = [conversations["challenger"][0], conversations["solver"][-1]]
    losses, own = [], []
    for example in batch:
        labels = [token if mine else -100 for token, mine in zip(example.ids_T, example.own_T, strict=True)]
        whole = model(input_ids=torch.tensor([example.ids_T]), labels=torch.tensor([labels]))
        losses.append(whole.loss.item())
        own.append(sum(example.own_T))
    trainer = OwnTokenTrainer(
        model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    )
    loss = trainer.compute_loss(model, collate(batch, pad_id=0)).item()
    assert loss == pytest.approx((losses[0] * own[0] + losses[1] * own[1]) / sum(own), rel=1e-5)


def test_a_save_that_a_kill_cut_off_is_not_resumed(tmp_path):
    assert newest_checkpoint(tmp_path / "none yet") is None
    for step in (40, 80):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors").touch()
    (tmp_path / "checkpoint-40" / "trainer_state.json").touch()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-40")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-40"]


def test_the_adapter_is_written_at_half_its_size_into_a_new_folder(tiny_model, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2))
    model.save_pretrained(str(tmp_path / "checkpoint-40"))
    write_adapter(tmp_path / "checkpoint-40", out := tmp_path / "policies" / "demo", {"losses": [0.5]})
    (weights,) = out.glob("*.safetensors")
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}
    assert (out / "SHA256SUMS").read_text().split()[0] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert str(tmp_path) not in (out / "adapter_config.json").read_text()
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), out)
    assert again.active_adapter == "default"
