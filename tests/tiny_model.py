"""A two-layer Llama with the demo's tokenizer: everything about it is real but its size."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.demo_models import load_base_tokenizer


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer to `folder`, and return it."""
    tokenizer = load_base_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
