"""The warm start that makes the demo policy: a short supervised LoRA run on rendered demonstrations.

SmolLM2-135M neither keeps the format nor calls a tool. A few dozen steps on conversations from the demo
world's `warmstart` split teach it both; how to ask difficult questions and how to answer them is left to
reinforcement learning.

    python -m policies.warm_start --out policies/demo        # about 15 minutes on two cores

A plain Transformers loop, shorter to read than the configuration of a trainer. Only assistant tokens are
trained on, and logits are computed for those alone.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm

from data.demo_world import generate_world
from pipeline.stages.demo import load_base_model, load_base_tokenizer
from policies.demonstrations import make_demonstrations, world_retriever
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA

CHALLENGER = {1: 150, 2: 120, 3: 50, 4: 20}
SOLVER = {1: 100, 2: 80, 3: 20}
"""Demonstrations by hop: about the 4:3:2:1 of the run, solver questions short of four hops."""


@dataclass(frozen=True)
class Example:
    """One conversation: `ids_T` as in a rollout, `own_T` marks the model's own tokens."""

    ids_T: list[int]
    own_T: list[bool]


def encode(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Example:
    """The token ids exactly as a rollout builds them: prompt, turns with their end token, tool responses."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ids = render_prompt_ids(tokenizer, messages[:first], [SEARCH_TOOL_SCHEMA])
    own = [False] * len(ids)
    for index in range(first, len(messages)):
        message = messages[index]
        if message["role"] == "assistant":
            new = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            assistant_ids = new
        else:
            new = tool_turn_ids(tokenizer, assistant_ids, [message["content"]])
        ids += new
        own += [message["role"] == "assistant"] * len(new)
    return Example(ids, own)


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless shuffled epochs, batched among conversations of like length to save padding."""
    while True:
        order = sorted(rng.sample(examples, len(examples)), key=lambda example: len(example.ids_T) // 64)
        chunks = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        yield from rng.sample(chunks, len(chunks))


def loss_of(model: Any, batch: Sequence[Example], pad_id: int) -> torch.Tensor:
    """Mean negative log-likelihood of the batch's own tokens."""
    length = max(len(example.ids_T) for example in batch)
    ids_BT = torch.tensor([e.ids_T + [pad_id] * (length - len(e.ids_T)) for e in batch])
    own_BT = torch.tensor([e.own_T + [False] * (length - len(e.own_T)) for e in batch])
    mask_BT = torch.tensor([[1] * len(e.ids_T) + [0] * (length - len(e.ids_T)) for e in batch])
    base = model.get_base_model()
    # bfloat16 products halve the time on processors that have them; weights and optimizer stay float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BTD = base.model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
        logits_NV = base.lm_head(hidden_BTD[:, :-1][own_BT[:, 1:]])
    return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][own_BT[:, 1:]])


def train(out: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the adapter and write it to `out` in bfloat16, with its checksum, settings and losses."""
    torch.manual_seed(seed)
    world = generate_world(17, "warmstart", passages=480, chains_per_hop=400)
    retrieve = world_retriever(world, topk=2)  # as in config/model/demo-policy.yaml
    demonstrations = make_demonstrations(
        world, challenger=CHALLENGER, solver=SOLVER, retrieve=retrieve, seed=seed
    )
    tokenizer = load_base_tokenizer()
    examples = [encode(tokenizer, demonstration["messages"]) for demonstration in demonstrations]
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_base_model(), lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, max(0.1, 1 - step / steps))
    )
    losses: list[float] = []
    source = batches(examples, batch_size, random.Random(seed))
    for _ in (progress := tqdm(range(steps), desc="warm start")):
        loss = loss_of(model, next(source), tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    model.to(torch.bfloat16).save_pretrained(str(out), save_embedding_layers=False)
    adapter = out / "adapter_model.safetensors"
    digest = hashlib.sha256(adapter.read_bytes()).hexdigest()
    (out / "SHA256SUMS").write_text(f"{digest}  {adapter.name}\n")
    figures = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "losses": losses}
    (out / "warm_start.json").write_text(json.dumps(figures, indent=1) + "\n")
    # peft writes the absolute path of a model that came from a folder, and a README of its own.
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Train the demo policy's adapter."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("policies/demo"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
