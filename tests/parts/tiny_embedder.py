"""A one-layer embedder with the packaged one's tokenizer: all about it is real but its size and sense."""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer, BertConfig, BertModel

from search.embedders import PACKAGED_EMBEDDER, EmbedderSpec, local_folder

MAX_TOKENS = 128


def save_tiny_embedder(
    folder: Path, seed: int = 0, mode: str = "mean", prompted: bool = True, dense: bool = False, **more: Any
) -> EmbedderSpec:
    """Write a random model of 32 dimensions, or `dense` 16, that reads 128 tokens, and return its spec."""
    torch.manual_seed(seed)
    bare = folder.with_name(f"{folder.name}-bare")
    tokenizer = AutoTokenizer.from_pretrained(local_folder(PACKAGED_EMBEDDER))
    tokenizer.save_pretrained(bare)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
    )
    BertModel(config).save_pretrained(bare)
    reader = Transformer(str(bare), max_seq_length=MAX_TOKENS)
    modules: list[torch.nn.Module] = [reader, Pooling(32, mode, prompted)]
    if dense:
        modules.append(Dense(32, 16))
    SentenceTransformer(modules=modules, device="cpu", **more).save(str(folder))
    return EmbedderSpec(str(folder), "cpu")
