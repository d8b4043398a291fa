"""The warm start that makes the demo policy: supervised LoRA steps on rendered demonstrations.

SmolLM2-135M neither keeps the format nor calls a tool, and no reward would ever teach it: all of its rollouts
score the same. A few hundred steps on conversations from worlds of the `warmstart` split teach it both, and
to read what it found, up to where it answers some questions sometimes. That is where reinforcement learning
has something to tell apart.

    python -m drzero.policies.warm_start --out drzero/policies/demo  # 40 minutes; rerun to resume

Transformers' Trainer, with one change: logits are computed for the model's own tokens alone, which are the
only ones trained on. The rate is constant, so that the first 100 of 280 steps are a run of 100.
"""

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from data.demo_world import generate_world
from drzero.policies.demonstrations import Demonstration, make_demonstrations, world_retriever
from drzero.stages.demo import load_base_model, load_base_tokenizer
from environments.conversation import Message
from verl_ext.method.chat import next_turn_ids, render_prompt_ids
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA

WORLD_SEEDS = range(17, 25)
"""Worlds of the `warmstart` split. No demonstration comes twice: of few, the model learns names by heart."""
EACH = {1: 75, 2: 75}
"""Demonstrations of one world by hop, for challenger and solver each: 2,400 in all, of which half search once
more than the other half, so that the model learns when to stop."""
SAVE_EVERY = 40
"""Steps between the checkpoints from which a killed run resumes."""


@dataclass(frozen=True)
class Example:
    """One conversation: `ids_T` as in a rollout, `own_T` marks the model's own tokens."""

    ids_T: list[int]
    own_T: list[bool]


def encode(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = (SEARCH_TOOL_SCHEMA,),
) -> Example:
    """The token ids exactly as a rollout builds them: prompt, turns with their end token, what follows."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ids = render_prompt_ids(tokenizer, messages[:first], list(tools) if tools else None)
    own = [False] * len(ids)
    for index in range(first, len(messages)):
        message = messages[index]
        if message["role"] == "assistant":
            new = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            assistant_ids = new
        else:
            new = next_turn_ids(tokenizer, assistant_ids, [message])
        ids += new
        own += [message["role"] == "assistant"] * len(new)
    return Example(ids, own)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """Those of every world, found with two passages a search as in config/model/demo-policy.yaml."""
    for world_seed in WORLD_SEEDS:
        world = generate_world(world_seed, "warmstart", passages=480, chains_per_hop=150)
        retrieve = world_retriever(world, topk=2)
        yield from make_demonstrations(world, challenger=EACH, solver=EACH, retrieve=retrieve, seed=seed)


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """A padded batch: token ids, what to attend to, and which tokens are the model's own."""
    length = max(len(example.ids_T) for example in examples)
    rest = [length - len(example.ids_T) for example in examples]
    return {
        "ids_BT": torch.tensor([e.ids_T + [pad_id] * n for e, n in zip(examples, rest, strict=True)]),
        "mask_BT": torch.tensor([[1] * len(e.ids_T) + [0] * n for e, n in zip(examples, rest, strict=True)]),
        "own_BT": torch.tensor([e.own_T + [False] * n for e, n in zip(examples, rest, strict=True)]),
    }


def batched(examples: Sequence[Example], size: int, rng: random.Random) -> list[Example]:
    """All in random order, but next to others of like length: in batches of `size` little is padded."""
    order = sorted(rng.sample(examples, len(examples)), key=lambda example: len(example.ids_T) // 64)
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return [example for batch in rng.sample(batches, len(batches)) for example in batch]


class OwnTokenTrainer(Trainer):
    """Transformers' Trainer with the mean negative log-likelihood of the batch's own tokens."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss alone; raises ValueError when outputs are asked for, since only some are computed."""
        if return_outputs:
            raise ValueError("logits are computed for own tokens only: there are no outputs to return")
        base, own_BT = model.get_base_model(), inputs["own_BT"]
        ids_BT = inputs["ids_BT"]
        hidden_BTD = base.model(input_ids=ids_BT, attention_mask=inputs["mask_BT"]).last_hidden_state
        logits_NV = base.lm_head(hidden_BTD[:, :-1][own_BT[:, 1:]])
        return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][own_BT[:, 1:]])


def train(out: Path, work: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the adapter, with checkpoints in `work` from which a rerun resumes, and write it to `out`."""
    tokenizer = load_base_tokenizer()
    examples = [encode(tokenizer, demonstration["messages"]) for demonstration in demonstrations(seed)]
    last, losses = fit(examples, tokenizer, work, steps, batch_size, lr, seed)
    figures = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "losses": losses}
    write_adapter(last, out, figures)


def fit(
    examples: Sequence[Example],
    tokenizer: Any,
    work: Path,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> tuple[Path, list[float]]:
    """Train an adapter of the base model; returns its last checkpoint in `work`, and the losses."""
    torch.manual_seed(seed)
    in_order = batched(examples, batch_size, random.Random(seed))
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = OwnTokenTrainer(
        model=get_peft_model(load_base_model(), lora),
        args=TrainingArguments(
            output_dir=str(work),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            weight_decay=0.0,
            max_grad_norm=1.0,
            # Of products alone, where it halves the time; weights and optimizer stay float32.
            use_cpu=True,
            bf16=True,
            seed=seed,
            save_steps=SAVE_EVERY,
            logging_steps=1,
            report_to="none",
            # Each is an Example, of which the Trainer knows no column.
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        ),
        train_dataset=in_order,
        data_collator=lambda batch: collate(batch, tokenizer.pad_token_id),
    )
    last, newest = work / f"checkpoint-{steps}", newest_checkpoint(work)
    if not last.is_dir():
        trainer.train(resume_from_checkpoint=newest)
    log = json.loads((last / TRAINER_STATE_NAME).read_text())["log_history"]
    # Four digits: on another processor a rerun has others in any case.
    return last, [round(entry["loss"], 4) for entry in log if "loss" in entry]


def newest_checkpoint(work: Path) -> str | None:
    """Where to resume, None if nowhere; what a kill has left of a save is removed."""
    for checkpoint in work.glob("checkpoint-*"):
        if not (checkpoint / TRAINER_STATE_NAME).is_file():  # which the Trainer writes last
            shutil.rmtree(checkpoint)
    return get_last_checkpoint(work) if work.is_dir() else None


def write_adapter(checkpoint: Path, out: Path, figures: dict[str, Any]) -> None:
    """Write a checkpoint's adapter to `out` in bfloat16, with its checksum, settings and losses."""
    weights = load_file(checkpoint / ADAPTER)
    halved = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(halved, out / ADAPTER, metadata={"format": "pt"})
    digest = hashlib.sha256((out / ADAPTER).read_bytes()).hexdigest()
    (out / "SHA256SUMS").write_text(f"{digest}  {ADAPTER}\n")
    (out / "warm_start.json").write_text(json.dumps(figures, indent=1) + "\n")
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    # peft writes the absolute path of a model that came from a folder, and sets in any order.
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config["target_modules"].sort()
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Train the demo policy's adapter."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("drzero/policies/demo"))
    parser.add_argument("--work", type=Path, default=Path("outputs/warm_start"))
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
