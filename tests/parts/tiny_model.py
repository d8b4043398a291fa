"""A two-layer Llama with the demo's tokenizer: only its size is unreal."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.demo_world import generate_world
from drzero.stages.demo_models import load_base_tokenizer
from verl_ext.method.demonstration import Example, encode
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.search_calls import render_tool_call

CALL = render_tool_call(["town"])
QUESTIONS = (
    "<think>So.</think><question>Who came?</question><answer>Vell</answer>",
    "<question>Who came?</question><answer>Vell</answer>",
)
ANSWERS = ("<answer>Vell</answer>", "<answer>nobody</answer>")
STEPS, BATCH, SAMPLED = 360, 12, 2000


def save_tiny_model(
    folder: Path, seed: int = 0, tokenizer: Any = None, *, surer: float = 1.0, **config: Any
) -> Path:
    """Write model and tokenizer to `folder`, and return it. Reading the packaged tokenizer takes seconds."""
    tokenizer = tokenizer or load_base_tokenizer()
    model = _new_model(tokenizer, seed, **config)
    with torch.no_grad():
        model.model.norm.weight *= surer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_speaking_model(folder: Path, seed: int = 0, tokenizer: Any = None) -> Path:
    """Like `save_tiny_model`, but it has memorized the protocol.

    It asks one of `QUESTIONS` about any document, often after a search, and gives one of `ANSWERS` to any
    question. So its runs have searches, right and wrong attempts, and different rewards. Each machine rounds
    differently, so this must work from any start: the worst of eleven seeds was right in 6 turns of 10.
    """
    tokenizer = tokenizer or load_base_tokenizer()
    model = _new_model(tokenizer, seed)
    examples = [encode(tokenizer, conversation) for conversation in _conversations(random.Random(seed))]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=6e-3,
        total_steps=STEPS,
        pct_start=0.05,
        anneal_strategy="linear",
        cycle_momentum=False,
        final_div_factor=2.0,
    )
    rng = random.Random(seed)
    for _ in range(STEPS):
        loss = _loss(model, rng.sample(examples, BATCH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _new_model(tokenizer: Any, seed: int, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **{"tie_word_embeddings": True} | config,
        )
    )


def _conversations(rng: random.Random, count: int = 320) -> list[list[dict[str, str]]]:
    world = generate_world(1, "warmstart", passages=60)
    passages = [f"{passage.title}\n{passage.text}" for passage in world.passages.values()]
    conversations = []
    for _ in range(count):
        is_challenger = rng.random() < 0.6
        if is_challenger:
            conversation = challenger_messages(rng.choice(passages), rng.randint(1, 4), "short")
        else:
            other = rng.choice(world.chains).question
            conversation = solver_messages(rng.choice(("Who came?", other)), "short")
        if rng.random() < 0.5:
            found = rng.sample(passages, rng.randint(1, 3))
            results = "\n".join(f"[{i}] {text}" for i, text in enumerate(found, start=1))
            conversation += [{"role": "assistant", "content": CALL}, {"role": "tool", "content": results}]
        last = rng.choice(QUESTIONS if is_challenger else ANSWERS)
        conversations.append([*conversation, {"role": "assistant", "content": last}])
    return conversations


def _loss(model: LlamaForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """Negative log-likelihood of the assistant's tokens among themselves and some random others.

    The whole vocabulary would take ten times as long. Padding on the right needs no mask.
    """
    length = max(len(example.ids_T) for example in batch)
    ids_BT = torch.tensor([e.ids_T + [0] * (length - len(e.ids_T)) for e in batch])
    own_BT = torch.tensor([e.own_T + [False] * (length - len(e.own_T)) for e in batch])
    own, places = torch.unique(ids_BT[:, 1:][own_BT[:, 1:]], return_inverse=True)
    others = torch.randint(model.config.vocab_size, (SAMPLED,))
    candidates = torch.cat([own, others[~torch.isin(others, own)]])
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state
    logits_NC = hidden_BTD[:, :-1][own_BT[:, 1:]] @ model.lm_head.weight[candidates].T
    logits_NC[:, len(own) :] += math.log(model.config.vocab_size / SAMPLED)  # each represents many
    return torch.nn.functional.cross_entropy(logits_NC, places)
