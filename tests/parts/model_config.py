"""The config.json of a model with given sizes."""

from typing import Any

from drzero.preflight.model_shape import ModelShape


def config_of(shape: ModelShape) -> dict[str, Any]:
    """A config.json for a shape, as `shape_of` reads it."""
    return {
        "model_type": "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
    }
