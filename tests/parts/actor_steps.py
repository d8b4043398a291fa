"""Training steps by veRL's actor worker, in separate processes (`gloo_step.py`)."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from drzero.recipe.compose import compose_plain, resolve

Row = dict[str, torch.Tensor]
PROMPT, CLIP, TOKENS = 4, 0.2, 1000
SPOILED, PADDING = range(24, 32), (1, 2, 3, 9, 17)
"""Of 32 rows. One rank of four has all spoiled rows, and there are more padding rows than ranks."""


def make_steps(
    folder: Path,
    config: dict[str, Any],
    cases: dict[Any, dict[str, Any]],
    ranks: int = 1,
    *,
    start: Sequence[str] = (),
    path: str = "",
) -> dict[Any, Any]:
    """The results of `gloo_step.py` by case. `start` runs the script, `path` is its PYTHONPATH."""
    torch.save({"config": config, "cases": cases}, folder / "steps.pt")
    run = subprocess.run(
        [sys.executable, *start, str(Path(__file__).parent / "gloo_step.py"), str(folder), str(ranks)],
        env=os.environ
        | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin"}
        | ({"PYTHONPATH": path} if path else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    moved: dict[Any, Any] = torch.load(folder / f"moved_{ranks}.pt", weights_only=False)
    return moved


def save_policy(folder: Path, tokenizer: Any) -> Path:
    """A tiny model whose vocabulary is as large as the rows need: each logit takes time."""
    save_tiny_model(folder, tokenizer=tokenizer)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy.resize_token_embeddings(TOKENS)
    policy.save_pretrained(folder)
    return folder


def make_rows() -> list[Row]:
    """A batch as the trainer leaves it: rows that do not count have masks and advantages of zero."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for index in range(32):
        length = 1 if index in PADDING else 2 + index % 5
        ids_T = torch.randint(100, TOKENS, (PROMPT + length,), generator=draw)
        mask_R = torch.ones(length, dtype=torch.int64) * (index not in SPOILED and index not in PADDING)
        log_probs_R = -6 - torch.rand(length, generator=draw)
        rows.append(training_row(ids_T, mask_R, log_probs_R, torch.randn(1, generator=draw)))
    return rows


def training_row(ids_T: torch.Tensor, mask_R: torch.Tensor, log_probs_R: torch.Tensor, advantage: Any) -> Row:
    """A row as the trainer leaves it: a prompt, and a response sampled with `log_probs_R`."""
    prompt = len(ids_T) - len(mask_R)
    return {
        "input_ids": ids_T,
        "position_ids": torch.arange(len(ids_T)),
        "prompts": ids_T[:prompt],
        "responses": ids_T[prompt:],
        "response_mask": mask_R,
        "loss_mask": mask_R,
        "old_log_probs": log_probs_R,
        "ref_log_prob": log_probs_R - 0.5,
        "advantages": advantage * mask_R,
    }


def actor_config(model: Path) -> dict[str, Any]:
    config = compose_plain("challenger", ["hardware=cpu", f"base_model={model}"])
    resolved = resolve(config).actor_rollout_ref
    changes = {
        "actor": {
            "clip_ratio": CLIP,
            "optim": {
                "optimizer": "SGD",
                "lr": 1.0,
                "weight_decay": 0.0,
                "clip_grad": 1e9,
                # FSDP2 knows no fused SGD.
                "override_optimizer_config": None,
                "lr_warmup_steps_ratio": 0.0,
            },
        },
        # Any number of rows can be scored.
        "rollout": {"log_prob_micro_batch_size_per_gpu": 1},
    }
    made = OmegaConf.to_container(OmegaConf.merge(resolved, changes))
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}
