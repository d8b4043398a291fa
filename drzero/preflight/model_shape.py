"""A model's sizes by its config.json, without any weights: dense decoders of the `FAMILIES`.

load_shape("Qwen/Qwen2.5-7B-Instruct").parameters    # 7_615_616_512
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from drzero.checkpoints.reading import in_one_line
from drzero.ops.hub import hub_fault


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    context: int  # max_position_embeddings, veRL's limit for lengths
    tied: bool = False  # Whether the output layer is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    stretched_context: int = 0  # context with RoPE scaling, by SGLang's rule; 0 if the same

    @property
    def embeddings(self) -> int:
        """Weights of the embedding and the output layer, tied ones counted once."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def query_size(self) -> int:
        """Length of all heads' queries together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Length of all heads' keys together."""
        return self.kv_heads * self.head_size

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's seven matrices."""
        return (
            (self.hidden, self.query_size),
            (self.hidden, self.kv_size),
            (self.hidden, self.kv_size),
            (self.query_size, self.hidden),
            *((self.hidden, self.intermediate),) * 2,
            (self.intermediate, self.hidden),
        )

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linear)
        biases = self.qkv_bias * (self.query_size + 2 * self.kv_size) + self.out_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return matrices + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_size

    @property
    def parameters(self) -> int:
        """All weights, tied ones counted once."""
        return self.embeddings + self.layers * self.layer + self.hidden

    def adapter(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on every matrix of every layer."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linear)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
# From each model's published config.json, by bare name.
KNOWN = {
    # hidden, layers, heads, key heads, head, MLP, vocabulary, context
    "qwen2.5-0.5b-instruct": ModelShape(896, 24, 14, 2, 64, 4864, 151936, 32768, tied=True, qkv_bias=True),
    "qwen2.5-3b-instruct": ModelShape(2048, 36, 16, 2, 128, 11008, 151936, 32768, tied=True, qkv_bias=True),
    "qwen2.5-7b-instruct": ModelShape(3584, 28, 28, 4, 128, 18944, 152064, 32768, qkv_bias=True),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12288, 151936, 40960, qk_norm=True),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 128, 17408, 151936, 40960, qk_norm=True),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25600, 151936, 40960, qk_norm=True),
    "smollm2-135m": ModelShape(576, 30, 9, 3, 64, 1536, 49152, 8192, tied=True),
    "demo-policy": ModelShape(576, 30, 9, 3, 64, 1536, 49152, 8192, tied=True),
    "wordle-policy": ModelShape(576, 30, 9, 3, 64, 1536, 49152, 8192, tied=True),
}


def model_config(model: str) -> dict[str, Any] | None:
    """The config.json of a folder or a cached hub id, or None. Raises ValueError if it is no JSON object."""
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:  # a path that does not exist
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError) as error:
        raise ValueError(in_one_line(error)) from error
    if not isinstance(config, dict):
        raise ValueError("no object")
    return config


def load_shape(model: str) -> ModelShape | None:
    """A model's sizes, by its config.json, the table, or the hub; None if unknown."""
    config = model_config(model)
    if config is None:
        known = KNOWN.get(Path(model).name.lower())
        if known is not None or not _fetch_config(model):
            return known
        config = model_config(model)
    return shape_of(config) if config else None


@functools.cache
def _fetch_config(model: str) -> bool:
    if Path(model).is_absolute() or Path(model).exists() or hub_fault() is not None:
        return False
    try:
        hf_hub_download(model, "config.json")
    # The hub client's errors are OSError or ValueError; a failed connection is httpx's.
    except (OSError, ValueError, httpx.HTTPError):
        return False  # check_models reports it
    return True


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes from a config.json; None for an unknown family. Raises ValueError for an invalid size."""
    family = config.get("model_type")
    if family not in FAMILIES or "num_experts" in config:
        return None

    def size(name: str, otherwise: int | None = None) -> int:
        value = config.get(name) or otherwise
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {config.get(name)!r}, not a positive number")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    has_bias = bool(config.get("attention_bias", False))
    context = size("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or not isinstance(scaling.get("factor", 1), int | float):
        raise ValueError(f"its RoPE scaling is {scaling!r}, not an object with a factor")
    kind = scaling.get("rope_type", scaling.get("type"))
    # SGLang's rule: some kinds already include the scaling in their positions.
    is_included = "original_max_position_embeddings" in scaling or kind in (None, "default", "llama3")
    return ModelShape(
        hidden=hidden,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_size=size("head_dim", hidden // heads),
        intermediate=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        context=context,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        stretched_context=0 if is_included else int(context * float(scaling.get("factor", 1))),
    )


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
