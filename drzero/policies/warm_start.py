"""The warm start of the demo policy: supervised LoRA steps, because all its first rollouts score the same.

python -m drzero.policies.warm_start    # 40 minutes; rerun to resume
"""

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from data.demo_world import generate_world
from drzero.policies.demonstrations import Demonstration, make_demonstrations, world_retriever
from drzero.stages.demo_models import load_base_model, load_base_tokenizer
from verl_ext.method.demonstration import Example, encode

WORLD_SEEDS = range(17, 25)
"""Worlds of the `warmstart` split. Repeated demonstrations would teach the model names by heart."""
EACH = {1: 75, 2: 75}
"""By hop, for each world and role: 2,400 in all. With both hop counts the model learns when to stop."""
SAVE_EVERY = 40


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The demonstrations of every world, with two passages a search as in config/model/demo-policy.yaml."""
    for world_seed in WORLD_SEEDS:
        world = generate_world(world_seed, "warmstart", passages=480, chains_per_hop=150)
        retrieve = world_retriever(world, topk=2)
        yield from make_demonstrations(world, challenger=EACH, solver=EACH, retrieve=retrieve, seed=seed)


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """A batch padded on the right: token ids, attention mask, and the model's own tokens."""
    ids = [torch.tensor(example.ids_T) for example in examples]
    own = [torch.tensor(example.own_T) for example in examples]
    return {
        "ids_BT": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "mask_BT": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "own_BT": pad_sequence(own, batch_first=True),
    }


def batched(examples: Sequence[Example], size: int, rng: random.Random) -> list[Example]:
    """Shuffle, but keep batches of `size` together whose lengths are alike, to pad little."""
    order = sorted(rng.sample(examples, len(examples)), key=lambda example: len(example.ids_T) // 64)
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return [example for batch in rng.sample(batches, len(batches)) for example in batch]


class OwnTokenTrainer(Trainer):
    """Transformers' Trainer, with the mean negative log-likelihood of the model's own tokens."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss. Raises ValueError if outputs are requested, because only some are computed."""
        if return_outputs:
            raise ValueError("logits are computed for own tokens only: there are no outputs to return")
        base, own_BT = model.get_base_model(), inputs["own_BT"]
        ids_BT = inputs["ids_BT"]
        hidden_BTD = base.model(input_ids=ids_BT, attention_mask=inputs["mask_BT"]).last_hidden_state
        logits_NV = base.lm_head(hidden_BTD[:, :-1][own_BT[:, 1:]])
        return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][own_BT[:, 1:]])


def train(out: Path, work: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the adapter and write it to `out`. A rerun resumes from the checkpoints in `work`."""
    tokenizer = load_base_tokenizer()
    examples = [encode(tokenizer, demonstration["messages"]) for demonstration in demonstrations(seed)]
    last, losses = fit(examples, tokenizer, work, steps, batch_size, lr, seed)
    figures = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "losses": losses}
    write_adapter(last, out, figures)


def fit(
    examples: Sequence[Example], tokenizer: Any, work: Path, steps: int, batch_size: int, lr: float, seed: int
) -> tuple[Path, list[float]]:
    """Train an adapter of the base model. Returns its last checkpoint in `work`, and the losses."""
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
            # Only products are in bfloat16, which halves the time. Weights and optimizer stay float32.
            use_cpu=True,
            bf16=True,
            seed=seed,
            save_steps=SAVE_EVERY,
            logging_steps=1,
            report_to="none",
            # The Trainer would drop the columns of an Example.
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
    # Further digits differ between processors.
    return last, [round(entry["loss"], 4) for entry in log if "loss" in entry]


def newest_checkpoint(work: Path) -> str | None:
    """The checkpoint to resume, if any. Removes incomplete ones."""
    for checkpoint in work.glob("checkpoint-*"):
        if not (checkpoint / TRAINER_STATE_NAME).is_file():  # the Trainer writes it last
            shutil.rmtree(checkpoint)
    return get_last_checkpoint(work) if work.is_dir() else None


def write_adapter(checkpoint: Path, out: Path, figures: dict[str, Any]) -> None:
    """Write a checkpoint's adapter in bfloat16, with checksum, settings and losses."""
    weights = load_file(checkpoint / ADAPTER)
    halved = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(halved, out / ADAPTER, metadata={"format": "pt"})
    digest = hashlib.sha256((out / ADAPTER).read_bytes()).hexdigest()
    (out / "SHA256SUMS").write_text(f"{digest}  {ADAPTER}\n")
    (out / "warm_start.json").write_text(json.dumps(figures, indent=1) + "\n")
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    # peft writes an absolute path, and sets in any order.
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config["target_modules"].sort()
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def options(description: str | None, **defaults: Any) -> dict[str, Any]:
    """The command line's options, each of its default's type."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in (defaults | {"lr": 1e-3, "seed": 0}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return vars(parser.parse_args())


def main() -> None:
    """Train the demo policy's adapter."""
    places = {"out": Path(__file__).parent / "demo", "work": Path("outputs/warm_start")}
    train(**options(main.__doc__, **places, steps=280, batch_size=6))


if __name__ == "__main__":
    main()
